# Whether GPUs of several ranks can send to one another directly: sets W4Q_HAVE_NCCL. Its header is all that a build
# needs; the library is opened where there are ranks.
set(W4Q_NCCL AUTO CACHE STRING "Build what GPUs of several ranks send by: AUTO (where CUDA and NCCL are found), ON or OFF")
set_property(CACHE W4Q_NCCL PROPERTY STRINGS AUTO ON OFF)
set(W4Q_HAVE_NCCL OFF)
if(W4Q_HAVE_CUDA AND NOT W4Q_NCCL STREQUAL "OFF")
  find_path(W4Q_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(W4Q_NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${CUDAToolkit_LIBRARY_DIR} ${W4Q_NCCL_INCLUDE}/../lib)
  set(W4Q_NCCL_FILE libnccl.so.2)  # as the loader finds it
  if(W4Q_NCCL_LIBRARY)
    set(W4Q_NCCL_FILE ${W4Q_NCCL_LIBRARY})
  endif()
  if(W4Q_NCCL_INCLUDE)
    set(W4Q_HAVE_NCCL ON)
  endif()
endif()
if(W4Q_NCCL STREQUAL "ON" AND NOT W4Q_HAVE_NCCL)
  message(FATAL_ERROR "W4Q_NCCL=ON: it takes the CUDA toolkit and NCCL's header (libnccl-dev; -DW4Q_NCCL_INCLUDE=folder)")
endif()
