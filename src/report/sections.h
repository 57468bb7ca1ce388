// The parts of the page, each HTML or nothing where the report has nothing to say.
#pragma once

#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::report {

/// A report that the page shows.
struct Part {
  std::string name;  ///< HTML; empty: the only one
  const io::Json* json = nullptr;
};
using Parts = std::vector<Part>;

/// One of the models that the page is about; its JSON belongs to the report. Null where it is not there.
struct Side {
  std::string name;                   ///< HTML: "model", "A", "B", or the part's
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

/// The models of all parts: one of verify, two of compare, none of others.
Sides sides_of(const Parts& parts);

std::string verdict_section(const Parts& parts);
std::string checks_section(const Parts& parts);
std::string sizes_section(const Sides& sides);
std::string kl_section(const Sides& sides);
std::string windows_section(const Sides& sides);
std::string errors_section(const Sides& sides);
/// What quantize chose for a target of bits or bytes, and what it could have.
std::string allocation_section(const Parts& parts);
std::string speed_section(const Parts& parts);
std::string kernels_section(const Parts& parts);
std::string provenance_section(const Parts& parts);

}  // namespace w4q::report
