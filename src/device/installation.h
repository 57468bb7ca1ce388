// What of CUDA this program was built with and finds at run time. Compiled with and without CUDA.
#pragma once

#include <string>
#include <vector>

namespace w4q::device {

/// A library that is opened when it is first needed.
struct FoundLibrary {
  std::string name;
  std::string for_what;
  std::string why;  ///< it cannot be opened; empty: it can
};

/// Versions are 1000 · major + 10 · minor.
struct Installation {
  int toolkit = 0;  ///< that the program was built with; 0: without CUDA
  int driver = 0;   ///< the newest toolkit that the driver can serve; 0: there is no driver
  std::vector<FoundLibrary> libraries;
};

/// Looks now; opens the libraries.
Installation find_installation();

}  // namespace w4q::device
