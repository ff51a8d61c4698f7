# libtycho_mpi.so: ranks that are processes, for the MPI that is here. It is loaded when a program first asks for them.
option(TYCHO_MPI "Ranks that are processes of MPI, where MPI is found" ON)
if(TYCHO_MPI)
  pkg_search_module(MPI IMPORTED_TARGET ompi-c ompi mpich)
  if(MPI_FOUND)
    add_library(tycho_mpi MODULE src/comm/mpi/plugin.c)
    target_link_libraries(tycho_mpi PRIVATE PkgConfig::MPI)
    set_target_properties(tycho_mpi PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
    install(TARGETS tycho_mpi LIBRARY DESTINATION ${INSTALL_CLIBDIR}) # beside libtycho.so, which looks for it there
  endif()
endif()
