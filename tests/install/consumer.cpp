// Quantizes a model and verifies it, by the installed library.
#include <core/error.h>
#include <pipeline/quantize_model.h>
#include <verify/ladder.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    w4q::pipeline::QuantizeRequest request;
    request.model = argv[1];
    request.output = argv[2];
    request.scheme = w4q::formats::parse_scheme("kbit3-b32-e4m4");
    const auto report = w4q::pipeline::quantize_model(request);
    w4q::verify::CheckContext context({.model = argv[2], .base = argv[1]});
    const auto findings = w4q::verify::climb(context);
    std::cout << report.plan.packed_tensors() << " tensors packed, "
              << (findings.checks.passed() ? "sound" : findings.text) << "\n";
    return findings.checks.passed() ? 0 : 1;
  } catch (const w4q::Error& error) {
    std::cerr << error.what() << "\n";
    return 3;
  }
}
