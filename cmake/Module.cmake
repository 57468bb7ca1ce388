# w4q_module(NAME FLOOR n [DEPENDS modules…] [HEADERS_ONLY_FROM module pattern] SOURCES … [PACKAGES targets…])
#
# Declares the static library w4q_NAME made of the folder src/NAME. A module may depend on modules of lower floors
# only, and its files may include headers of declared dependencies only: both are checked at configure time, so an
# upward or sideways edge cannot be built (docs/design.md 2).
function(w4q_module NAME)
  cmake_parse_arguments(ARG "" "FLOOR" "DEPENDS;SOURCES;PACKAGES;PRIVATE_PACKAGES" ${ARGN})
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
  w4q_check_includes(${NAME} "${ARG_DEPENDS}")

  add_library(w4q_${NAME} STATIC ${ARG_SOURCES})
  w4q_use_prelude(w4q_${NAME} w4q_prelude)
  target_include_directories(w4q_${NAME} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(w4q_${NAME} PRIVATE w4q_flags ${ARG_PRIVATE_PACKAGES} PUBLIC ${ARG_PACKAGES})
  foreach(dependency ${ARG_DEPENDS})
    target_link_libraries(w4q_${NAME} PUBLIC w4q_${dependency})
  endforeach()
endfunction()

# Refuses an include of a project folder that the module does not declare.
function(w4q_check_includes NAME DEPENDS)
  file(GLOB_RECURSE files CONFIGURE_DEPENDS
    ${PROJECT_SOURCE_DIR}/src/${NAME}/*.h ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cpp
    ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cu ${PROJECT_SOURCE_DIR}/src/${NAME}/*.cuh)
  foreach(file ${files})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    file(STRINGS ${file} includes REGEX "^#include \"[a-z0-9_]+/")
    foreach(line ${includes})
      string(REGEX REPLACE "^#include \"([a-z0-9_]+)/.*" "\\1" folder "${line}")
      if(NOT folder STREQUAL NAME AND NOT folder IN_LIST DEPENDS)
        message(FATAL_ERROR "${file}: includes ${folder}/, which module ${NAME} does not declare (docs/design.md 2)")
      endif()
      # A kernel may know where a layout puts the bits, never how they got there.
      if(NAME STREQUAL "kernels" AND folder STREQUAL "repack" AND NOT line MATCHES "\"repack/layout_")
        message(FATAL_ERROR "${file}: kernels may include only repack/layout_*.h")
      endif()
    endforeach()
  endforeach()
endfunction()

# w4q_test(NAME SOURCES … LINK modules…): one GoogleTest program tests_NAME, each case its own ctest entry.
function(w4q_test NAME)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(tests_${NAME} ${ARG_SOURCES})
  w4q_use_prelude(tests_${NAME} w4q_test_prelude)
  target_link_libraries(tests_${NAME} PRIVATE w4q_flags w4q_test_support GTest::gtest GTest::gmock GTest::gtest_main)
  foreach(module ${ARG_LINK})
    target_link_libraries(tests_${NAME} PRIVATE w4q_${module})
  endforeach()
  # Tests share the cores: OpenMP threads that spin while they wait would starve each other (apps/w4q/main.cpp).
  gtest_discover_tests(tests_${NAME} TEST_PREFIX ${NAME}. DISCOVERY_MODE PRE_TEST 
    PROPERTIES TIMEOUT 600 ENVIRONMENT GOMP_SPINCOUNT=1000)
endfunction()
