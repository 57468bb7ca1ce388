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
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  # Files may be added to the target after this call.
  cmake_language(EVAL CODE "cmake_language(DEFER CALL w4q_leave_alone [[${TARGET}]])")
endfunction()

# Those files of TARGET that must be compiled by themselves whatever they are.
function(w4q_leave_alone TARGET)
  get_target_property(sources ${TARGET} SOURCES)
  foreach(source ${sources})
    if(source MATCHES "\\.cu$")  # which CMake from 3.31 on would take, too
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    elseif(source MATCHES "\\.cpp$")
      file(STRINGS ${source} targets REGEX "hwy/foreach_target\\.h" LIMIT_COUNT 1)
      if(targets)
        set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
      endif()
    endif()
  endforeach()
endfunction()
