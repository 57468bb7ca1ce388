// Runs that were ended are taken up, and end with the bytes of one that was not.
#include <signal.h>

#include <cstdlib>
#include <fstream>

#include "core/rng.h"
#include "launch.h"

namespace w4q::test {
namespace {}  // namespace
}  // namespace w4q::test
