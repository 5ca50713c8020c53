// Fibers: stacks on which threads of a block wait for each other without the operating system.
//
// x86-64 and AArch64 change stacks in a few instructions; other processors, and builds with
// EMULATOR_UCONTEXT, leave it to ucontext. AddressSanitizer is told of every change.

#pragma once

#include <cstddef>
#include <cstdint>

#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_UCONTEXT
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

struct Fiber {
    void *saved = nullptr; // stack pointer while it does not run
    char *low = nullptr;   // of its stack, filled in for the operating system's by the first fiber
    size_t bytes = 0;
    void *fake = nullptr; // AddressSanitizer's
#ifdef EMULATOR_UCONTEXT
    ucontext_t context;
#endif
};

#ifdef EMULATOR_UCONTEXT

inline void change_stack(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }

inline void prepare_stack(Fiber &fiber, char *top, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.low;
    fiber.context.uc_stack.ss_size = static_cast<size_t>(top - fiber.low);
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

#else

extern "C" void emulator_change_stack(void **save, void *load)
    __attribute__((visibility("hidden")));

#ifdef __x86_64__
constexpr int kSavedWords = 6;
asm(R"(
    .pushsection .text
    .globl emulator_change_stack
    .hidden emulator_change_stack
    .type emulator_change_stack, @function
emulator_change_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emulator_change_stack, . - emulator_change_stack
    .popsection
)");
#else
constexpr int kSavedWords = 20; // x19 to x29, x30 where to go on, d8 to d15
asm(R"(
    .pushsection .text
    .globl emulator_change_stack
    .hidden emulator_change_stack
    .type emulator_change_stack, %function
emulator_change_stack:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp d8, d9, [sp, #80]
    stp d10, d11, [sp, #96]
    stp d12, d13, [sp, #112]
    stp d14, d15, [sp, #128]
    stp x29, x30, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp d8, d9, [sp, #80]
    ldp d10, d11, [sp, #96]
    ldp d12, d13, [sp, #112]
    ldp d14, d15, [sp, #128]
    ldp x29, x30, [sp, #144]
    add sp, sp, #160
    ret
    .size emulator_change_stack, . - emulator_change_stack
    .popsection
)");
#endif

inline void change_stack(Fiber &from, Fiber &to) { emulator_change_stack(&from.saved, to.saved); }

// As if the fiber had called emulator_change_stack at the very beginning of `entry`.
inline void prepare_stack(Fiber &fiber, char *top, void (*entry)()) {
    auto address = reinterpret_cast<uintptr_t>(top) & ~static_cast<uintptr_t>(15);
    auto *words = reinterpret_cast<uintptr_t *>(address);
    *--words = 0;
#ifdef __x86_64__
    *--words = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < kSavedWords; ++i) *--words = 0;
#else
    --words; // keeps the stack aligned
    *--words = reinterpret_cast<uintptr_t>(entry);
    for (int i = 1; i < kSavedWords; ++i) *--words = 0;
#endif
    fiber.saved = words;
}

#endif

// Run `to` until something changes back to `from`.
inline void change_fiber(Fiber &from, Fiber &to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake, to.low, to.bytes);
    change_stack(from, to);
    __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#else
    change_stack(from, to);
#endif
}

// The first thing a fiber does; `starter` is the operating system's stack.
inline void begin_fiber([[maybe_unused]] Fiber &starter) {
#ifdef __SANITIZE_ADDRESS__
    const void *low = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
    if (starter.low == nullptr) {
        starter.low = static_cast<char *>(const_cast<void *>(low));
        starter.bytes = bytes;
    }
#endif
}

} // namespace emulator
