# w4q_module(NAME FLOOR n [PLAIN] [DEPENDS modules…] [HEADERS_ONLY_FROM module/header…] [ROOMS "room: rooms…"…] SOURCES …
#            [ALONE files…] [APART "file file…"…] [PACKAGES targets…] [PRIVATE_PACKAGES targets…])
#
# Declares the static library w4q_NAME made of the folder src/NAME. A module may depend on modules of lower floors
# only, and its files may include headers of declared dependencies only: both are checked at configure time, so an
# upward or sideways edge cannot be built (docs/design.md 2). Of a module that HEADERS_ONLY_FROM names, only the headers
# named there. ROOMS lists the folders of src/NAME, each with those before it whose headers it may include. Only device
# calls the CUDA runtime. ALONE are files that cannot be compiled together with others, APART those that cannot with each
# other (cmake/Unity.cmake). PLAIN is a module without loops over weights (cmake/Compiler.cmake).
function(w4q_module NAME)
  cmake_parse_arguments(ARG "PLAIN" "FLOOR" "DEPENDS;HEADERS_ONLY_FROM;ROOMS;SOURCES;ALONE;APART;PACKAGES;PRIVATE_PACKAGES" ${ARGN})
  set_property(GLOBAL PROPERTY W4Q_FLOOR_${NAME} ${ARG_FLOOR})
  foreach(dependency ${ARG_DEPENDS})
    get_property(dependency_floor GLOBAL PROPERTY W4Q_FLOOR_${dependency})
    if(NOT DEFINED dependency_floor OR dependency_floor STREQUAL "")
      message(FATAL_ERROR "module ${NAME} depends on ${dependency}, which is not declared before it")
    endif()
    if(NOT dependency_floor LESS ARG_FLOOR)
      message(FATAL_ERROR
        "module ${NAME} (floor ${ARG_FLOOR}) must not depend on ${dependency} (floor ${dependency_floor}): "
        "a folder includes only folders on a lower floor")
    endif()
  endforeach()
  w4q_check_includes(${NAME} "${ARG_DEPENDS}" "${ARG_HEADERS_ONLY_FROM}")
  if(NOT NAME STREQUAL "device")
    w4q_check_cuda_calls(${NAME})
  endif()
  if(ARG_ROOMS)
    w4q_check_rooms(${NAME} "${ARG_ROOMS}")
  endif()

  set_property(GLOBAL APPEND PROPERTY W4Q_MODULES ${NAME})
  add_library(w4q_${NAME} STATIC ${ARG_SOURCES})
  w4q_unity(w4q_${NAME} ALONE ${ARG_ALONE} APART ${ARG_APART})
  set(flags w4q_flags)
  set(prelude w4q_prelude)
  if(W4Q_OPTIMIZE STREQUAL "g" OR (ARG_PLAIN AND W4Q_OPTIMIZE EQUAL 1))
    set(flags w4q_plain_flags)
    set(prelude w4q_plain_prelude)
  endif()
  w4q_choose_instructions(${ARG_SOURCES})
  w4q_use_prelude(w4q_${NAME} ${prelude})
  target_include_directories(w4q_${NAME} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(w4q_${NAME} PRIVATE ${flags} ${ARG_PRIVATE_PACKAGES} PUBLIC ${ARG_PACKAGES})
  foreach(dependency ${ARG_DEPENDS})
    target_link_libraries(w4q_${NAME} PUBLIC w4q_${dependency})
  endforeach()
endfunction()

# Of the files those that Highway compiles for several instruction sets: for which, and optimised where nothing else is.
function(w4q_choose_instructions)
  list(FILTER ARGN INCLUDE REGEX "\\.cpp$")
  foreach(source ${ARGN})
    get_filename_component(path ${source} ABSOLUTE)
    w4q_is_compiled_by_highway(${path} many_times)
    if(many_times)
      set_source_files_properties(${source} PROPERTIES
        COMPILE_OPTIONS "${W4Q_SIMD_OPTION};$<$<STREQUAL:${W4Q_OPTIMIZE},g>:-O1>")
    endif()
  endforeach()
endfunction()

# The files of src/NAME, in FILES; a change of one configures anew.
function(w4q_files_of NAME FILES)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/${NAME}/*.h ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cpp
    ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cu ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cuh)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  set(${FILES} ${files} PARENT_SCOPE)
endfunction()

# Refuses an include of a project folder that the module does not declare, and of a header that HEADERS_ONLY_FROM does
# not name where it names others of that folder.
function(w4q_check_includes NAME DEPENDS HEADERS)
  string(REGEX REPLACE "/[^;]*" "" partial "${HEADERS}")
  w4q_files_of(${NAME} files)
  foreach(file ${files})
    file(STRINGS ${file} includes REGEX "^#include \"[a-z0-9_]+/")
    foreach(line ${includes})
      string(REGEX REPLACE "^#include \"(([a-z0-9_]+)/[^\"]+)\".*" "\\1;\\2" parts "${line}")
      list(GET parts 0 header)
      list(GET parts 1 folder)
      if(NOT folder STREQUAL NAME AND NOT folder IN_LIST DEPENDS)
        message(FATAL_ERROR "${file}: includes ${folder}/, which module ${NAME} does not declare (docs/design.md 2)")
      endif()
      if(folder IN_LIST partial AND NOT header IN_LIST HEADERS)
        message(FATAL_ERROR "${file}: includes ${header}, which is not among the headers that ${NAME} may see of ${folder}/")
      endif()
    endforeach()
  endforeach()
endfunction()

# Refuses an include between folders of src/NAME that ROOMS does not list: "room: rooms that it may include…", each of
# which has been listed before.
function(w4q_check_rooms NAME ROOMS)
  w4q_files_of(${NAME} all)
  set(known)
  foreach(row ${ROOMS})
    string(REGEX MATCH "^([a-z0-9_]+):(.*)$" row "${row}")
    set(room ${CMAKE_MATCH_1})
    separate_arguments(allowed UNIX_COMMAND "${CMAKE_MATCH_2}")
    foreach(other ${allowed})
      if(NOT other IN_LIST known)
        message(FATAL_ERROR "module ${NAME}: ${room}/ may include only folders that stand before it, not ${other}/")
      endif()
    endforeach()
    list(APPEND known ${room})
    set(files ${all})
    list(FILTER files INCLUDE REGEX "^${PROJECT_SOURCE_DIR}/src/${NAME}/${room}/")
    foreach(file ${files})
      file(STRINGS ${file} includes REGEX "^#include \"${NAME}/[a-z0-9_]+/")
      foreach(line ${includes})
        string(REGEX REPLACE "^#include \"${NAME}/([a-z0-9_]+)/.*" "\\1" other "${line}")
        if(NOT other STREQUAL room AND NOT other IN_LIST allowed)
          message(FATAL_ERROR "${file}: includes ${NAME}/${other}/, which ${room}/ may not (src/${NAME}/CMakeLists.txt)")
        endif()
      endforeach()
    endforeach()
  endforeach()
  file(GLOB folders LIST_DIRECTORIES true RELATIVE ${PROJECT_SOURCE_DIR}/src/${NAME} ${PROJECT_SOURCE_DIR}/src/${NAME}/*)
  foreach(folder ${folders})
    if(IS_DIRECTORY ${PROJECT_SOURCE_DIR}/src/${NAME}/${folder} AND NOT folder IN_LIST known)
      message(FATAL_ERROR "src/${NAME}/${folder}: a folder that ROOMS does not list")
    endif()
  endforeach()
endfunction()

# Refuses calls of the CUDA runtime: src/device makes them.
function(w4q_check_cuda_calls NAME)
  w4q_files_of(${NAME} files)
  foreach(file ${files})
    file(STRINGS ${file} calls REGEX "(^|[^A-Za-z0-9_])cuda[A-Z][A-Za-z0-9_]*\\(")
    if(calls)
      message(FATAL_ERROR "${file}: calls the CUDA runtime, which src/device wraps: ${calls}")
    endif()
  endforeach()
endfunction()

# w4q_test(NAME [WHOLE] [LONG] SOURCES … [ALONE files…] [APART "file file…"…] [TOGETHER suites…] LINK modules…): one
# GoogleTest program tests_NAME, each case its own ctest entry, but for the suites that are run TOGETHER since what they set
# up takes longer than their cases. WHOLE: the program is one entry, since its cases take less than it takes to start. So are
# those of GPUs (…_cuda…) where there is none and all of them skip. Whole programs and suites are begun first, then those
# whose cases are LONG, so that at the end no core waits for the last of them. ALONE are those of the sources that cannot be
# compiled together with others, APART those that cannot with each other.
function(w4q_test NAME)
  cmake_parse_arguments(ARG "WHOLE;LONG" "" "SOURCES;ALONE;APART;TOGETHER;LINK" ${ARGN})
  add_executable(tests_${NAME} ${ARG_SOURCES})
  w4q_unity(tests_${NAME} ALONE ${ARG_ALONE} APART ${ARG_APART})
  w4q_use_prelude(tests_${NAME} w4q_test_prelude)
  target_link_libraries(tests_${NAME} PRIVATE w4q_plain_flags w4q_test_support GTest::gtest GTest::gmock GTest::gtest_main)
  foreach(module ${ARG_LINK})
    target_link_libraries(tests_${NAME} PRIVATE w4q_${module})
  endforeach()
  # Tests share the cores: OpenMP threads that spin while they wait would starve each other (apps/w4q/main.cpp).
  if(ARG_WHOLE OR (NAME MATCHES "_cuda" AND W4Q_FAST_COMPILED_KERNELS))
    add_test(NAME ${NAME} COMMAND tests_${NAME})
    set_tests_properties(${NAME} PROPERTIES TIMEOUT 600 COST 20 ENVIRONMENT GOMP_SPINCOUNT=0)
    return()
  endif()
  set(together ${ARG_TOGETHER})
  list(TRANSFORM together APPEND ".*")
  string(REPLACE ";" ":" together "${together}")
  set(cost)
  if(ARG_LONG)
    set(cost COST 10)
  endif()
  set(filter)
  if(together)
    set(filter TEST_FILTER "-${together}")
  endif()
  gtest_discover_tests(tests_${NAME} TEST_PREFIX ${NAME}. DISCOVERY_MODE PRE_TEST ${filter}
    PROPERTIES TIMEOUT 600 ${cost} ENVIRONMENT GOMP_SPINCOUNT=0)
  foreach(suite ${ARG_TOGETHER})
    add_test(NAME ${NAME}.${suite} COMMAND tests_${NAME} --gtest_filter=${suite}.*)
    set_tests_properties(${NAME}.${suite} PROPERTIES TIMEOUT 600 COST 20 ENVIRONMENT GOMP_SPINCOUNT=0)
  endforeach()
endfunction()
