// What compiled kernels call by themselves: before every access to memory (the calls that
// -fsanitize=thread inserts) and where they do what C++ leaves undefined (-fsanitize=undefined).
// Defined here instead of in the sanitizers' libraries, so that a finding ends a launch, not the
// process.

#include <cstring>

#include "state.h"

namespace emulator {

namespace {

void hooked(void *address, u64 bytes, Access access, void *culprit) {
    if (machine.thread == nullptr) return; // the library is being loaded
    // Who looks at the same place again and again waits for somebody.
    if (access == Access::kVolatileRead) offer_turn(machine.block->atomic_offers, true);
    check_access(static_cast<const u8 *>(address), bytes, access, culprit);
}

struct SourceLocation {
    const char *file;
    u32 line, column;
};

[[noreturn]] void undefined(const void *data, const std::string &what, void *culprit) {
    const auto *location = static_cast<const SourceLocation *>(data);
    const char *slash = std::strrchr(location->file, '/');
    fail("undefined: " + what + " (" + (slash ? slash + 1 : location->file) + ":" +
             std::to_string(location->line) + ")",
         culprit);
}

struct MismatchData {
    SourceLocation location;
    const void *type;
    u8 log_alignment;
    u8 kind;
};

} // namespace

} // namespace emulator

using emulator::Access;

extern "C" {

#define EMULATOR_CALLER __builtin_return_address(0)
#define EMULATOR_HOOK(NAME, BYTES, ACCESS)                                                         \
    void NAME(void *address) { emulator::hooked(address, BYTES, Access::ACCESS, EMULATOR_CALLER); }
#define EMULATOR_HOOKS(BYTES)                                                                      \
    EMULATOR_HOOK(__tsan_read##BYTES, BYTES, kRead)                                                \
    EMULATOR_HOOK(__tsan_write##BYTES, BYTES, kWrite)                                              \
    EMULATOR_HOOK(__tsan_unaligned_read##BYTES, BYTES, kRead)                                      \
    EMULATOR_HOOK(__tsan_unaligned_write##BYTES, BYTES, kWrite)                                    \
    EMULATOR_HOOK(__tsan_volatile_read##BYTES, BYTES, kVolatileRead)                               \
    EMULATOR_HOOK(__tsan_volatile_write##BYTES, BYTES, kVolatileWrite)                             \
    EMULATOR_HOOK(__tsan_unaligned_volatile_read##BYTES, BYTES, kVolatileRead)                     \
    EMULATOR_HOOK(__tsan_unaligned_volatile_write##BYTES, BYTES, kVolatileWrite)
EMULATOR_HOOKS(1)
EMULATOR_HOOKS(2)
EMULATOR_HOOKS(4)
EMULATOR_HOOKS(8)
EMULATOR_HOOKS(16)
void __tsan_read_range(void *address, unsigned long bytes) {
    emulator::hooked(address, bytes, Access::kRead, EMULATOR_CALLER);
}
void __tsan_write_range(void *address, unsigned long bytes) {
    emulator::hooked(address, bytes, Access::kWrite, EMULATOR_CALLER);
}
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}

#ifndef __SANITIZE_ADDRESS__

void __ubsan_handle_type_mismatch_v1_abort(emulator::MismatchData *data, unsigned long pointer) {
    if (pointer == 0) emulator::undefined(data, "null pointer", EMULATOR_CALLER);
    const unsigned long alignment = 1ul << data->log_alignment;
    emulator::undefined(data,
                        pointer % alignment != 0
                            ? "misaligned access, which needs an address that is a multiple of " +
                                  std::to_string(alignment)
                            : "access to an object that is too small",
                        EMULATOR_CALLER);
}
void __ubsan_handle_out_of_bounds_abort(void *data, unsigned long index) {
    emulator::undefined(data,
                        "index " + std::to_string(static_cast<long>(index)) +
                            " out of the bounds of an array",
                        EMULATOR_CALLER);
}

#define EMULATOR_UNDEFINED(NAME, WHAT)                                                             \
    void __ubsan_handle_##NAME(void *data) { emulator::undefined(data, WHAT, EMULATOR_CALLER); }
EMULATOR_UNDEFINED(add_overflow_abort, "signed addition overflows")
EMULATOR_UNDEFINED(sub_overflow_abort, "signed subtraction overflows")
EMULATOR_UNDEFINED(mul_overflow_abort, "signed multiplication overflows")
EMULATOR_UNDEFINED(negate_overflow_abort, "signed negation overflows")
EMULATOR_UNDEFINED(divrem_overflow_abort, "division by zero or out of range")
EMULATOR_UNDEFINED(shift_out_of_bounds_abort, "shift out of range")
EMULATOR_UNDEFINED(load_invalid_value_abort, "read of a value that its type does not have")
EMULATOR_UNDEFINED(pointer_overflow_abort, "pointer arithmetic overflows")
EMULATOR_UNDEFINED(invalid_builtin_abort, "argument that a built-in function does not allow")
EMULATOR_UNDEFINED(nonnull_arg_abort, "null pointer where none is allowed")
EMULATOR_UNDEFINED(float_cast_overflow_abort, "conversion of a value out of range")
EMULATOR_UNDEFINED(builtin_unreachable, "a place that cannot be reached")
EMULATOR_UNDEFINED(missing_return, "a function ends without a return value")

#endif
}
