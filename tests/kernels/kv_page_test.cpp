// Where things stand on pages of the KV cache, and their names.
#include "kernels/attention/kv_page.h"

#include <gtest/gtest.h>

#include <vector>

#include "support.h"

namespace w4q::kernels {
namespace {

TEST(KvPage, EveryByteOfAPageOfQ4HasOneUse) {
  for (const int dim : {64, 128, 256}) {
    std::vector<int> keys(static_cast<size_t>(kv_head_page_bytes(KvType::q4, dim)));
    std::vector<int> values(static_cast<size_t>(kv_value_page_bytes(KvType::q4, dim)));
    const auto use = [](std::vector<int>& page, int at, int bytes) {
      for (int i = 0; i < bytes; ++i) ++page.at(static_cast<size_t>(at + i));
    };
    for (int slot = 0; slot < kv_page_tokens; ++slot) {
      for (int word = 0; word < dim / 8; ++word) use(keys, q4_key_word(dim, slot, word), 4);
      for (int quad = 0; quad < dim / 4; ++quad) use(values, q4_value_halfword(dim, slot, quad), 2);
      for (int group = 0; group < dim / kv_group; ++group) {
        use(keys, q4_key_step(dim, slot, group), 2);
        use(keys, q4_key_least(dim, slot, group), 2);
        use(values, q4_value_step(dim, slot, group), 2);
        use(values, q4_value_least(dim, slot, group), 2);
      }
    }
    EXPECT_EQ(keys, std::vector<int>(keys.size(), 1)) << dim;
    EXPECT_EQ(values, std::vector<int>(values.size(), 1)) << dim;
  }
}

TEST(KvPage, CodesOfFp4ShareAHalfword) {
  for (int j = 0; j < 4; ++j) {
    for (uint32_t code = 0; code < 16; ++code) EXPECT_EQ(fp4_code(fp4_halfword(code, j), j), code);
  }
  uint32_t all = 0;
  for (int j = 0; j < 4; ++j) all += fp4_halfword(15, j);
  EXPECT_EQ(all, 0xFFFFu) << "no bit is shared";
}

TEST(KvPage, TypesHaveNames) {
  for (const KvType type : kv_types) EXPECT_EQ(parse_kv_type(to_string(type)), type);
  test::expect_error(ErrorCode::bad_argument, {"q5", "f16, fp8, q4, q4h, fp4r"}, [] { parse_kv_type("q5"); });
}

}  // namespace
}  // namespace w4q::kernels
