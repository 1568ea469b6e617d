#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "native/abi.hpp"

// A few lines instead of a framework: tests register themselves, a failed check throws.

namespace exeunt::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Test {
    std::string name;
    std::function<void()> body;
};

inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Registrar {
    Registrar(const char* name, std::function<void()> body) {
        tests().push_back({name, std::move(body)});
    }
};

/// Number of random programs, from the command line.
inline std::uint64_t num_programs = 1000;

template <typename Value>
std::string show(const Value& value) {
    std::ostringstream text;
    if constexpr (std::is_enum_v<Value>) {
        text << static_cast<long long>(value);
    } else if constexpr (requires { text << value; }) {
        text << value;
    } else {
        text << "?";
    }
    return text.str();
}

inline void check_true(bool condition, const char* text, const char* file, int line) {
    if (!condition) {
        throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
    }
}

template <typename Left, typename Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file,
                 int line) {
    if (!(left == right)) {
        throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text + ": " +
                      show(left) + " against " + show(right));
    }
}

template <typename Thrown, typename Body>
void check_throws(Body body, const char* text, const char* file, int line) {
    try {
        body();
    } catch (const Thrown&) {
        return;
    }
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": no error from " + text);
}

}  // namespace exeunt::test

#define EXEUNT_JOIN_(a, b) a##b
#define EXEUNT_JOIN(a, b) EXEUNT_JOIN_(a, b)
#define TEST(name)                                                          \
    static void EXEUNT_JOIN(test_, __LINE__)();                             \
    static const exeunt::test::Registrar EXEUNT_JOIN(registrar_, __LINE__)( \
        name, EXEUNT_JOIN(test_, __LINE__));                                \
    static void EXEUNT_JOIN(test_, __LINE__)()
#define CHECK(condition) exeunt::test::check_true((condition), #condition, __FILE__, __LINE__)
#define CHECK_EQUAL(left, right) \
    exeunt::test::check_equal((left), (right), #left " == " #right, __FILE__, __LINE__)
#define CHECK_THROWS(Type, ...) \
    exeunt::test::check_throws<Type>([&] { __VA_ARGS__; }, #__VA_ARGS__, __FILE__, __LINE__)
