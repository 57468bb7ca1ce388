#include "kernels/sass.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace w4q::test::sass {
namespace {

using testing::ElementsAre;

/// A listing of one kernel from its instructions alone, 16 bytes each.
Kernel kernel_of(std::initializer_list<std::string_view> instructions) {
  std::stringstream listing;
  listing << "\tFunction : plain\n" << std::hex;
  uint32_t address = 0;
  for (const std::string_view instruction : instructions) {
    listing << "        /*" << (address < 16 ? "000" : "00") << address << "*/   " << instruction
            << " ;   /* 0x0000000000007918 */\n        /* 0x000fc00000000000 */\n";
    address += 16;
  }
  auto kernels = parse_listing(listing);
  return kernels.at(0);
}

TEST(Sass, LineOfAnInstruction) {
  const auto load = parse_line("        /*1cd0*/         LDG.E.128.CONSTANT R16, [R16.64] ;   /* 0x000000041010 */");
  ASSERT_TRUE(load);
  EXPECT_EQ(load->address, 0x1cd0u);
  EXPECT_EQ(load->opcode, "LDG.E.128.CONSTANT");
  EXPECT_FALSE(load->conditional);
  EXPECT_FALSE(load->target);
  const auto guarded = parse_line("/*0010*/ @P4 LDG.E.U16 R18, [R70.64+0x4] ; /* 0x00 */");
  ASSERT_TRUE(guarded);
  EXPECT_EQ(guarded->opcode, "LDG.E.U16");
  EXPECT_TRUE(guarded->conditional);
}

TEST(Sass, LineOfABranch) {
  const auto always = parse_line("/*0010*/ BRA 0x5da0 ;");
  EXPECT_EQ(always->target, 0x5da0u);
  EXPECT_FALSE(always->conditional);
  const auto guarded = parse_line("/*0010*/ @!P0 BRA 0x20 ;");
  EXPECT_EQ(guarded->target, 0x20u);
  EXPECT_TRUE(guarded->conditional);
  const auto operand = parse_line("/*0010*/ BRA.DIV ~URZ, 0x7b00 ;");
  EXPECT_EQ(operand->target, 0x7b00u);
  EXPECT_TRUE(operand->conditional);
}

TEST(Sass, LinesOfOtherThings) {
  for (const std::string_view line : {"", "code for sm_89", "        /* 0x000fe20003800000 */", "/*00g0*/ NOP ;",
                                      "/*0010*/ ;", "/*0010*/ NOP", "/*", "/**/", "/*10", "/*123456789*/ NOP ;"}) {
    EXPECT_FALSE(parse_line(line)) << line;
  }
}

TEST(Sass, ListingOfSeveralKernels) {
  std::istringstream listing(
      "/*0000*/ NOP ;\n\tFunction : _Z5firstILi4EEvi\n/*0000*/ NOP ;\n/*0010*/ EXIT ;\n\tFunction : second\n");
  const auto kernels = parse_listing(listing);
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_EQ(kernels[0].name, "void first<4>(int)");
  EXPECT_EQ(kernels[0].code.size(), 2u);
  EXPECT_EQ(kernels[1].name, "second");
  EXPECT_TRUE(kernels[1].code.empty());
}

TEST(Sass, Resources) {
  std::istringstream listing(
      "Resource usage:\n Common:\n  GLOBAL:0\n Function _Z5firstv:\n  REG:40 STACK:0 SHARED:1024 LOCAL:0\n"
      " Function second:\n  REG:255 STACK:8 SHARED:0 LOCAL:0\n");
  const auto all = parse_resources(listing);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].name, "first()");
  EXPECT_EQ(all[0].shared_bytes, 1024u);
  EXPECT_EQ(all[1].shared_bytes, 0u);
}

TEST(Sass, MainLoopIsTheShortestWithMostTensorInstructions) {
  const Kernel kernel = kernel_of({
      "IADD3 R0, R0, 0x1, RZ",          // 0: an outer loop begins
      "NOP",                            // 1: the main loop
      "HMMA.16816.F32 R0, R4, R8, R0",  // 2
      "@P0 BRA 0x10",                   // 3
      "@P1 BRA 0x0",                    // 4
      "HMMA.16816.F32 R0, R4, R8, R0",  // 5: straight on
      "LDS R0, [R1]",                   // 6: a loop without tensor instructions
      "@P0 BRA 0x60",                   // 7
      "EXIT",                           // 8
      "BRA 0x90",                       // 9: padding behind the end
  });
  const auto loop = main_loop(kernel);
  ASSERT_TRUE(loop);
  EXPECT_EQ(loop->first, 1u);
  EXPECT_EQ(loop->last, 3u);
}

TEST(Sass, NoMainLoop) {
  EXPECT_FALSE(main_loop(kernel_of({"HMMA.16816.F32 R0, R4, R8, R0", "EXIT", "BRA 0x20"})));
  EXPECT_FALSE(main_loop(kernel_of({"NOP", "@P0 BRA 0x0", "EXIT"})));
  EXPECT_FALSE(main_loop(kernel_of({"HMMA.16816.F32 R0, R4, R8, R0", "BRA 0x8"}))) << "into an instruction";
  EXPECT_FALSE(main_loop(Kernel{}));
}

TEST(Sass, SteadyWayLoadsAndTakesNoDetour) {
  const Kernel kernel = kernel_of({
      "@P0 BRA 0x60",                       // 0: nothing left to load
      "@P1 BRA 0x50",                       // 1: aligned activations
      "LDG.E.U16 R0, [R2.64]",              // 2: ragged ones
      "LDG.E.U16 R0, [R2.64]",              // 3
      "BRA 0x60",                           // 4
      "LDG.E.128 R0, [R2.64]",              // 5
      "@P2 BRA 0xa0",                       // 6: whole tiles
      "HMMA.16816.F32 R0, R4, R8, R0",      // 7: guarded ones
      "@P3 HMMA.16816.F32 R0, R4, R8, R0",  // 8
      "BRA 0xc0",                           // 9
      "HMMA.16816.F32 R0, R4, R8, R0",      // 10
      "HMMA.16816.F32 R0, R4, R8, R0",      // 11
      "@P4 BRA 0xe0",                       // 12: the row group goes on
      "STG.E [R2.64], R0",                  // 13
      "@!P5 CALL.REL.NOINC 0x100",          // 14: out of the loop
      "BRA 0x0",                            // 15
  });
  const auto loop = main_loop(kernel);
  ASSERT_TRUE(loop);
  EXPECT_THAT(steady_way(kernel, *loop), ElementsAre(0, 1, 5, 6, 10, 11, 12, 14, 15));
}

TEST(Sass, SteadyWayEndsWhereNothingGoesOn) {
  const Kernel kernel = kernel_of({"HMMA.16816.F32 R0, R4, R8, R0", "EXIT", "@P0 BRA 0x0"});
  const auto loop = main_loop(kernel);
  ASSERT_TRUE(loop);
  EXPECT_TRUE(steady_way(kernel, *loop).empty());
}

TEST(Sass, KindsOfInstructions) {
  const auto kind = [](std::string_view opcode) { return Instruction{0, std::string(opcode)}; };
  EXPECT_TRUE(is_global_load(kind("LDG.E.NA.128.CONSTANT")));
  EXPECT_TRUE(is_global_load(kind("LDGSTS.E.BYPASS.128")));
  EXPECT_FALSE(is_global_load(kind("LDGDEPBAR")));
  EXPECT_FALSE(is_global_load(kind("LDS.128")));
  EXPECT_TRUE(is_local(kind("STL.64")));
  EXPECT_FALSE(is_local(kind("STS.64")));
  EXPECT_TRUE(is_tensor(kind("HMMA.16816.F32.BF16")));
  EXPECT_FALSE(is_tensor(kind("HFMA2")));
  EXPECT_TRUE(has_part(kind("LDG.E.128"), "128"));
  EXPECT_FALSE(has_part(kind("LDG.E.1280"), "128"));
  EXPECT_FALSE(has_part(kind(""), "128"));
  EXPECT_TRUE(is_call(kind("CALL.REL.NOINC")));
}

}  // namespace
}  // namespace w4q::test::sass
