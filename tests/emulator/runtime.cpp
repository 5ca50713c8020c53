// The whole runtime as one translation unit.

#include "scheduler.cpp"

#include "memory.cpp"

#include "hooks.cpp"

#include "launch.cpp"
