# Compiling several files of a target as one: what they share (templates of the standard library, of JSON, of GoogleTest) is
# then read and instantiated once for all of them. For builds from nothing; a change compiles its neighbours too.
option(W4Q_UNITY "Compile several C++ files at once" OFF)
set(W4Q_UNITY_FILES 8 CACHE STRING "How many at once")

# w4q_unity(TARGET files…): compiles the C++ files of TARGET several at once, but for those named here, whose local names
# are also those of their neighbours (rows of one table, commands), and those that Highway compiles many times.
function(w4q_unity TARGET)
  if(NOT W4Q_UNITY)
    return()
  endif()
  set_target_properties(${TARGET} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${W4Q_UNITY_FILES})
  # A name local to one file may hide in another what is local there.
  target_compile_options(${TARGET} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-shadow>)
  get_target_property(sources ${TARGET} SOURCES)
  set(alone ${ARGN})
  foreach(source ${sources})
    if(source MATCHES "\\.cu$")  # which CMake from 3.31 on would take, too
      list(APPEND alone ${source})
    endif()
    if(NOT source MATCHES "\\.cpp$")
      continue()
    endif()
    file(STRINGS ${source} targets REGEX "hwy/foreach_target\\.h" LIMIT_COUNT 1)
    if(targets)
      list(APPEND alone ${source})
    endif()
  endforeach()
  set_source_files_properties(${alone} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
