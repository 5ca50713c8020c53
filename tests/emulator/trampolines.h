// From a kernel to a call with untyped arguments, and to a description of its parameters.

#pragma once

namespace emulator {

struct Parameter {
    char kind; // 'p' pointer, 'f' floating, 'i' signed, 'u' unsigned, 'b' bool, 's' a structure
    u32 bytes;
    char target_kind; // of a pointer: what it points to, 'v' for void
    u32 target_bytes;
    bool target_const;
};

struct Kernel {
    const char *name;
    void (*call)(void *const *arguments);
    const Parameter *parameters;
    u32 count;
};

struct SharedVariable {
    const char *name; // as the linker knows it
    u64 offset;       // in static shared memory
    u64 bytes;
};

template <class T> struct KindOf {
    static constexpr char value = 's';
};
template <> struct KindOf<bool> {
    static constexpr char value = 'b';
};
template <> struct KindOf<float> {
    static constexpr char value = 'f';
};
template <> struct KindOf<double> {
    static constexpr char value = 'f';
};
#define EMULATOR_KIND(T, KIND)                                                                     \
    template <> struct KindOf<T> {                                                                 \
        static constexpr char value = KIND;                                                        \
    };
EMULATOR_KIND(char, 'i')
EMULATOR_KIND(signed char, 'i')
EMULATOR_KIND(short, 'i')
EMULATOR_KIND(int, 'i')
EMULATOR_KIND(long, 'i')
EMULATOR_KIND(long long, 'i')
EMULATOR_KIND(unsigned char, 'u')
EMULATOR_KIND(unsigned short, 'u')
EMULATOR_KIND(unsigned int, 'u')
EMULATOR_KIND(unsigned long, 'u')
EMULATOR_KIND(unsigned long long, 'u')

template <class T> struct Bare {
    using Type = T;
    static constexpr bool constant = false;
};
template <class T> struct Bare<const T> {
    using Type = T;
    static constexpr bool constant = true;
};
template <class T> struct Bare<volatile T> : Bare<T> {};
template <class T> struct Bare<const volatile T> : Bare<const T> {};

template <class T> struct BytesOf {
    static constexpr u32 value = sizeof(T);
};
template <> struct BytesOf<void> {
    static constexpr u32 value = 0;
};
template <> struct KindOf<void> {
    static constexpr char value = 'v';
};

template <class T> struct ParameterOf {
    static constexpr Parameter value = {KindOf<T>::value, sizeof(T), 0, 0, false};
};
template <class T> struct ParameterOf<T *> {
    using Target = typename Bare<T>::Type;
    static constexpr Parameter value = {'p', sizeof(T *), KindOf<Target>::value,
                                        BytesOf<Target>::value, Bare<T>::constant};
};

template <u32... places> struct Places {};
template <u32 count, u32... places>
struct FirstPlaces : FirstPlaces<count - 1, count - 1, places...> {};
template <u32... places> struct FirstPlaces<0, places...> {
    using Type = Places<places...>;
};

template <auto function> struct Trampoline;
template <class... P, void (*function)(P...)> struct Trampoline<function> {
    static constexpr Parameter parameters[sizeof...(P) + 1] = {ParameterOf<P>::value..., {}};
    template <u32... places>
    EMULATOR_UNHOOKED static void spread(void *const *arguments, Places<places...>) {
        function(*static_cast<P *>(arguments[places])...);
    }
    EMULATOR_UNHOOKED static void call(void *const *arguments) {
        spread(arguments, typename FirstPlaces<sizeof...(P)>::Type());
    }
    static constexpr Kernel kernel(const char *name) {
        return {name, call, parameters, sizeof...(P)};
    }
};

} // namespace emulator

#define EMULATOR_KERNEL(NAME) emulator::Trampoline<&NAME>::kernel(#NAME),
