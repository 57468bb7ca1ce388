// Messages between ranks that a process makes of itself, here threads of it: whole, in order, and of no more memory than
// is under way.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/rng.h"
#include "ranks/local.h"

namespace w4q::test {
namespace {

using ranks::Mailboxes;
using ranks::Ranks;

/// body(ranks) in a thread for each rank.
template <class Body>
void run_with_mailboxes(Mailboxes& boxes, int size, const Body& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto transport = boxes.transport(rank);
      Ranks ranks(*transport);
      body(ranks);
    });
  }
  for (auto& thread : threads) thread.join();
}

std::string message(int from, int to, uint64_t number, size_t size) {
  std::string text(size, '\0');
  const uint64_t seed = static_cast<uint64_t>(100 * from + to);
  for (size_t i = 0; i < size; ++i) text[i] = static_cast<char>(random_bits(seed, number + i) & 0xff);
  return text;
}

TEST(Mailboxes, MessagesOfAllSizesArriveWholeAndInOrder) {
  constexpr int size = 3;
  constexpr size_t sizes[] = {0, 1, 65'519, 65'536, 300'000, 7, 1'000'000, 0};
  Mailboxes boxes(size);
  run_with_mailboxes(boxes, size, [&](Ranks& ranks) {
    for (uint64_t round = 0; round < 8; ++round) {
      for (int other = 0; other < size; ++other) {
        if (other != ranks.rank()) ranks.send(other, message(ranks.rank(), other, round, sizes[round]));
      }
      for (int other = 0; other < size; ++other) {
        if (other == ranks.rank()) continue;
        EXPECT_EQ(ranks.receive(other), message(other, ranks.rank(), round, sizes[round])) << "round " << round;
      }
    }
    const auto all = ranks.gather_everywhere(std::to_string(ranks.rank()));
    EXPECT_EQ(all, (std::vector<std::string>{"0", "1", "2"}));
  });
}

/// One that nobody has taken is not done, and what was taken is given back: 200 MB go through 3 MB and a page.
TEST(Mailboxes, OnlyWhatIsUnderWayTakesMemory) {
  constexpr size_t bytes = 2'000'000;
  Mailboxes boxes(2);
  const auto sender = boxes.transport(0), receiver = boxes.transport(1);
  std::vector<std::byte> sent(bytes), received(bytes);
  for (int round = 0; round < 100; ++round) {
    sent[static_cast<size_t>(round)] = std::byte{7};
    auto* const request = sender->send(1, 1, sent.data(), bytes);
    EXPECT_FALSE(sender->done(request));
    ASSERT_TRUE(receiver->waiting(-1, 1).has_value());
    EXPECT_EQ(receiver->waiting(0, 1)->size, bytes);
    EXPECT_TRUE(receiver->done(receiver->receive(0, 1, received.data(), bytes)));
    EXPECT_TRUE(sender->done(request));
    EXPECT_EQ(received, sent);
    EXPECT_LE(boxes.memory(), 3'000'000u + 65'536u);
  }
}

/// Of a failure is heard while other messages lie there.
TEST(Mailboxes, KindsDoNotWaitForOneAnother) {
  Mailboxes boxes(2);
  const auto sender = boxes.transport(0), receiver = boxes.transport(1);
  const std::byte large{1}, small{2};
  auto* const first = sender->send(1, 1, &large, 1);
  auto* const second = sender->send(1, 2, &small, 1);
  EXPECT_FALSE(receiver->waiting(0, 3).has_value());
  std::byte found{};
  ASSERT_TRUE(receiver->waiting(0, 2).has_value());
  receiver->receive(0, 2, &found, 1);
  EXPECT_EQ(found, small);
  EXPECT_TRUE(sender->done(second));
  EXPECT_FALSE(sender->done(first));
  ASSERT_TRUE(receiver->waiting(0, 1).has_value());
  receiver->receive(0, 1, &found, 1);
  EXPECT_EQ(found, large);
  EXPECT_TRUE(sender->done(first));
}

}  // namespace
}  // namespace w4q::test
