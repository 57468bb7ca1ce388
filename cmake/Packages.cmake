# Every outside library, found in one place. scripts/setup installs the Debian packages named here.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)          # libgomp, with the compiler
find_package(PkgConfig REQUIRED)                      # pkg-config
find_package(Eigen3 3.4 REQUIRED NO_MODULE)           # libeigen3-dev
find_package(nlohmann_json 3.11 REQUIRED)             # nlohmann-json3-dev
find_package(CLI11 2.1 REQUIRED)                      # libcli11-dev
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET libzstd)          # libzstd-dev
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)      # libxxhash-dev
pkg_check_modules(hwy REQUIRED IMPORTED_TARGET libhwy)            # libhwy-dev
pkg_check_modules(pcre2 REQUIRED IMPORTED_TARGET libpcre2-8)      # libpcre2-dev
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)  # libutf8proc-dev

# The CPU decoder multiplies with oneDNN, whose generated kernels fit the machine they run on. Without it Eigen takes
# over, compiled for the baseline instruction set: the same results, several times slower.
# (Searched for directly: the package's own CMake file would also ask for OpenCL, which the CPU path does not use.)
find_library(W4Q_DNNL_LIBRARY dnnl)                   # libdnnl-dev
find_path(W4Q_DNNL_INCLUDE dnnl.h)
if(W4Q_DNNL_LIBRARY AND W4Q_DNNL_INCLUDE)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES
    IMPORTED_LOCATION ${W4Q_DNNL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${W4Q_DNNL_INCLUDE})
else()
  message(WARNING "oneDNN not found: the CPU decoder falls back to Eigen at the baseline instruction set")
endif()

if(W4Q_TESTS)
  find_package(GTest REQUIRED)                        # libgtest-dev
  include(GoogleTest)
endif()
if(W4Q_BENCH)
  find_package(benchmark REQUIRED)                    # libbenchmark-dev
endif()
