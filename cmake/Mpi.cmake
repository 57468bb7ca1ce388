# Whether ranks can speak to each other: sets W4Q_HAVE_MPI.
set(W4Q_MPI AUTO CACHE STRING "Build what mpirun and srun need: AUTO (where MPI is found), ON or OFF")
set_property(CACHE W4Q_MPI PROPERTY STRINGS AUTO ON OFF)
set(W4Q_HAVE_MPI OFF)
if(NOT W4Q_MPI STREQUAL "OFF")
  find_package(MPI QUIET COMPONENTS C)                # libopenmpi-dev
  if(MPI_C_FOUND)
    set(W4Q_HAVE_MPI ON)
  elseif(W4Q_MPI STREQUAL "ON")
    message(FATAL_ERROR "W4Q_MPI=ON: MPI was not found; scripts/setup ranks installs Open MPI")
  endif()
endif()
