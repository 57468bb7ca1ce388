// What else may end work from outside, looked for where a signal is.
#pragma once

namespace w4q {

/// check_interrupt() calls `check` too, in whatever thread it is called; it may throw. Null: nothing. Set while nothing
/// works.
void set_interrupt_check(void (*check)()) noexcept;

/// The thread that waits for signals calls `listener` once one is noted, and nothing else any more: it may wait there for
/// what works to end. It must not throw. Null: nobody. Before watch_for_interrupts().
void set_interrupt_listener(void (*listener)(int signal)) noexcept;

}  // namespace w4q
