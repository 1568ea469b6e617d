#!/bin/sh
# Builds the C++ tests and runs them on the fake driver: by default with AddressSanitizer and
# UndefinedBehaviorSanitizer (preset asan), then with ThreadSanitizer (preset tsan).
# Usage: run_sanitizers.sh [PRESET...]
set -eu
cd "$(dirname "$0")/../.."
[ $# -gt 0 ] || set -- asan tsan
for preset in "$@"; do
    cmake --preset "$preset" >/dev/null
    cmake --build --preset "$preset"
    "build/$preset/tests/native/native_tests"
done
