// The whole runtime as one translation unit.

#include "scheduler.cpp"

#include "meetings.cpp"

#include "memory.cpp"

#include "hooks.cpp"

#include "launch.cpp"
