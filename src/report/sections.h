// The parts of the page, each HTML or nothing where the report has nothing to say.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::report {

/// One of the models that the page is about; its JSON belongs to the report. Null where it is not there.
struct Side {
  std::string name;                   ///< "model", "A", "B"
  std::string style;                  ///< class of its colour
  const io::Json* sizes = nullptr;    ///< bytes, bits_per_weight, kinds
  const io::Json* quality = nullptr;  ///< perplexity
  struct Tensor {
    std::string name;
    const io::Json* error = nullptr;  ///< scheme, sqnr_db, relative_error, max_error
  };
  std::vector<Tensor> tensors = {};
};
using Sides = std::vector<Side>;

/// The sides of a report: one of verify, two of compare.
Sides sides_of(const io::Json& report);

std::string verdict_section(const io::Json& report);
std::string checks_section(const io::Json& report);
std::string sizes_section(const Sides& sides);
std::string kl_section(const Sides& sides);
std::string windows_section(const Sides& sides);
std::string errors_section(const Sides& sides);
std::string speed_section(const io::Json& report);
std::string kernels_section(const io::Json& report);
std::string provenance_section(const io::Json& report);

}  // namespace w4q::report
