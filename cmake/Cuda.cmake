# CUDA is optional: W4Q_CUDA=AUTO builds the GPU passes where nvcc is found, ON demands it, OFF leaves them out.
set(W4Q_CUDA AUTO CACHE STRING "Build the CUDA passes: AUTO, ON or OFF")
set_property(CACHE W4Q_CUDA PROPERTY STRINGS AUTO ON OFF)
# sm_89 (RTX 4090) is the product's target. Each architecture holds machine code and PTX, so that a newer GPU can run what a
# 4090 runs (CUDA_FORCE_PTX_JIT=1).
set(W4Q_CUDA_ARCHITECTURES "auto" CACHE STRING
  "GPU architectures to compile for, e.g. 80;89;90; auto: those of this machine's GPUs, 89 where it has none")
# Warpgroup products exist in machine code for sm_90a alone.
set(W4Q_WGMMA AUTO CACHE STRING "Build the warpgroup products: AUTO (where architecture 90 is asked for), ON or OFF")
set_property(CACHE W4Q_WGMMA PROPERTY STRINGS AUTO ON OFF)
# An eighth of the time for kernels that are a fraction as fast: to see that they compile where no GPU runs them.
option(W4Q_FAST_COMPILED_KERNELS "Leave out most of the optimisation of kernels" OFF)

# Sets `result` to the architectures of this machine's GPUs, or to 89.
function(w4q_architectures_here result)
  set(found 89)
  find_program(W4Q_NVIDIA_SMI nvidia-smi)
  if(W4Q_NVIDIA_SMI)
    execute_process(COMMAND ${W4Q_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(status EQUAL 0 AND said MATCHES "^[0-9]+\\.[0-9]")
      string(REPLACE "." "" said "${said}")
      string(REPLACE "\n" ";" found "${said}")
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

set(W4Q_HAVE_CUDA OFF)
if(NOT W4Q_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # nvcc is often installed without being on PATH.
  find_program(W4Q_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(W4Q_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${W4Q_NVCC})
  endif()
  if(W4Q_CUDA_ARCHITECTURES STREQUAL "auto")
    w4q_architectures_here(CMAKE_CUDA_ARCHITECTURES)
  else()
    set(CMAKE_CUDA_ARCHITECTURES ${W4Q_CUDA_ARCHITECTURES})
  endif()
  if(W4Q_NVCC)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit REQUIRED)
    # CMake 3.25 does not know that nvcc 12 and newer speak C++20: tell it how.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
    set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo")
    # To pack to the least size, and PTX beside machine code, takes two fifths of the time of kernels that are compiled fast.
    set(packing size)
    if(W4Q_FAST_COMPILED_KERNELS)
      set(packing balance)
      list(TRANSFORM CMAKE_CUDA_ARCHITECTURES REPLACE "^([0-9]+a?)$" "\\1-real")
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.4)
      string(APPEND CMAKE_CUDA_FLAGS " --compress-mode=${packing}")
    endif()
    # nvcc 12.8 and newer know it. The assembler would tell of every warpgroup product that it loses speed by it.
    if(W4Q_FAST_COMPILED_KERNELS AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
      string(APPEND CMAKE_CUDA_FLAGS " --Ofast-compile=max -Xptxas=-w")
    endif()
    if(W4Q_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${W4Q_CCACHE})
    endif()
    set(W4Q_HAVE_CUDA ON)
    set(W4Q_HAVE_WGMMA ${W4Q_WGMMA})
    if(W4Q_WGMMA STREQUAL "AUTO")
      set(W4Q_HAVE_WGMMA OFF)
      if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90(-real)?(;|$)")
        set(W4Q_HAVE_WGMMA ON)
      endif()
    endif()
  elseif(W4Q_CUDA STREQUAL "ON")
    message(FATAL_ERROR "W4Q_CUDA=ON, but no nvcc was found: install the CUDA toolkit or set CUDA_HOME")
  else()
    message(STATUS "no nvcc found: building without the CUDA passes")
  endif()
endif()

target_compile_options(w4q_flags INTERFACE
  # No silent contraction, as on the CPU: bytes must agree. Kernels that want a fused multiply-add say fmaf or use mma.
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false -Werror=all-warnings --expt-relaxed-constexpr -Xcompiler=-Wall,-Wextra,-Werror>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CXX_COMPILER_ID:GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Xcompiler=-Wno-dangling-reference>)
