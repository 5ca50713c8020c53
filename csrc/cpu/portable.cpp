// The loops for any processor: 64 floats in memory, left to the compiler to vectorise.

#include "loops.h"

#include <cstdlib>
#include <cstring>

#include "block.inl"

#include "loops.inl"

namespace ddl_cpu {
extern const Loops portable_loops = kLoops;
}
