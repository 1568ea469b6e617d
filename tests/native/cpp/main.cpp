#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "harness.hpp"
#include "native/live.hpp"

namespace {

std::string describe_live() {
    std::string text;
    for (const auto& [kind, count] : exeunt::native::live_objects()) {
        if (count > 0) {
            text += " " + kind + "=" + std::to_string(count);
        }
    }
    return text;
}

}  // namespace

/// native_tests [--programs N] [FILTER]: runs the tests whose name contains FILTER.
int main(int argc, char** argv) {
    const char* filter = "";
    for (int index = 1; index < argc; ++index) {
        if (std::strcmp(argv[index], "--programs") == 0 && index + 1 < argc) {
            exeunt::test::num_programs = std::strtoull(argv[++index], nullptr, 10);
        } else {
            filter = argv[index];
        }
    }
    int num_failed = 0;
    int num_run = 0;
    std::size_t num_leaks = 0;
    for (const exeunt::test::Test& test : exeunt::test::tests()) {
        if (test.name.find(filter) == std::string::npos) {
            continue;
        }
        ++num_run;
        const std::string live_before = describe_live();
        std::string problem;
        try {
            test.body();
        } catch (const std::exception& error) {
            problem = error.what();
        }
        // Invariant 10, after every test whether it passed or not.
        if (problem.empty() && describe_live() != live_before) {
            problem = "live objects:" + describe_live() + ", before:" + live_before;
        }
        if (problem.empty() && exeunt::native::leaks().size() != num_leaks) {
            problem = "leaked by " + exeunt::native::leaks().back().call;
        }
        num_leaks = exeunt::native::leaks().size();
        std::printf("%s %s%s%s\n", problem.empty() ? "ok  " : "FAIL", test.name.c_str(),
                    problem.empty() ? "" : "\n     ", problem.c_str());
        num_failed += problem.empty() ? 0 : 1;
    }
    std::printf("%d of %d tests passed\n", num_run - num_failed, num_run);
    return num_failed == 0 && num_run > 0 ? 0 : 1;
}
