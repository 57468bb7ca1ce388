// The experts of a base as another version of it holds them: in stacks, or one by one.
#pragma once

#include "io/checkpoint.h"
#include "model/opened.h"

namespace w4q::model {

/// Whether one of the two has experts in stacks and the other one by one, by their names alone.
bool stacks_otherwise(const io::Checkpoint& base, const io::Checkpoint& candidate);

/// `base` with its experts as `candidate` holds them: those of stacks by the names that they have one by one, or those that
/// have such names as rows of stacks. Gates and ups stand in a stack as the architecture has them, and of one that is not
/// known as agrees better with what the other holds. A base of few bits, and one whose experts stand as those of
/// `candidate` do, is itself.
OpenedModel experts_like(OpenedModel base, const OpenedModel& candidate);

}  // namespace w4q::model
