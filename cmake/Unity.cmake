# Compiling several files of a target as one: what they share (templates of the standard library, of JSON, of GoogleTest, the
# headers of CUDA) is then read and instantiated once for all of them. For builds from nothing; a change compiles its
# neighbours too.
option(W4Q_UNITY "Compile several files at once" OFF)
set(W4Q_UNITY_FILES 8 CACHE STRING "How many of C++ at once")
set(W4Q_UNITY_CUDA_FILES 5 CACHE STRING "How many of CUDA at once")

# w4q_unity(TARGET files…): compiles the files of TARGET several at once, but for those named here, whose local names
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
  cmake_language(EVAL CODE "cmake_language(DEFER CALL w4q_unite_cuda [[${TARGET}]] [[${ARGN}]])")
endfunction()

# The same of the CUDA files of TARGET, which CMake does from 3.31 on only: a file that includes them takes their place.
function(w4q_unite_cuda TARGET ALONE)
  get_target_property(sources ${TARGET} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  list(REMOVE_ITEM sources "" ${ALONE})
  set(number 0)
  list(LENGTH sources left)
  while(left GREATER 0)
    list(SUBLIST sources 0 ${W4Q_UNITY_CUDA_FILES} together)
    list(REMOVE_ITEM sources ${together})
    list(LENGTH sources left)
    list(TRANSFORM together REPLACE "(.+)" "#include \"${CMAKE_CURRENT_SOURCE_DIR}/\\1\"\n" OUTPUT_VARIABLE lines)
    string(JOIN "" text ${lines})
    set(file ${CMAKE_CURRENT_BINARY_DIR}/${TARGET}_unity_${number}.cu)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    target_sources(${TARGET} PRIVATE ${file})
    set_source_files_properties(${file} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_source_files_properties(${together} PROPERTIES HEADER_FILE_ONLY ON)
    math(EXPR number "${number} + 1")
  endwhile()
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
