#!/bin/sh
# Builds the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer, then with
# ThreadSanitizer, and runs them on the fake driver. Arguments go to the test program.
set -eu
cd "$(dirname "$0")/../.."
for preset in asan tsan; do
    cmake --preset "$preset" >/dev/null
    cmake --build --preset "$preset"
    "build/$preset/tests/native/native_tests" "$@"
done
