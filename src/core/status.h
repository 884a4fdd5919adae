// SPDX-License-Identifier: Apache-2.0
// Errors inside the library: thrown as attune::Failure, turned into a status and a thread-local message at the C ABI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "attune/attune.h"

namespace attune {

class Failure : public std::exception {
 public:
  Failure(attune_status status, std::string message) : status_(status), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  attune_status status() const noexcept { return status_; }

 private:
  attune_status status_;
  std::string message_;
};

namespace detail {
inline void append_to(std::string& s, std::string_view x) { s += x; }
inline void append_to(std::string& s, const char* x) { s += x; }
inline void append_to(std::string& s, const std::string& x) { s += x; }
template <class T>
requires std::is_arithmetic_v<T>
void append_to(std::string& s, T x) { s += std::to_string(x); }
}  // namespace detail

// Joins strings and numbers into one message.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::string s;
  (detail::append_to(s, parts), ...);
  return s;
}

// Behind a noun: cat(n, " token", plural_s(n)).
constexpr const char* plural_s(int64_t n) { return n == 1 ? "" : "s"; }

template <class... Parts>
[[noreturn]] void fail(attune_status status, const Parts&... parts) {
  throw Failure(status, cat(parts...));
}

// Throws INVALID_ARGUMENT with the joined message unless ok. Parts should be cheap: they are evaluated even if ok.
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail(ATTUNE_INVALID_ARGUMENT, parts...);
}

// Throws unless the caller's workspace holds `need` bytes and is aligned; who: "the plan".
void check_workspace(const char* who, size_t need, const void* workspace, size_t bytes);

void log_message(attune_log_level level, const std::string& message);
void set_log_callback(attune_log_callback callback, void* user);

void set_last_error(const char* message) noexcept;
const char* last_error() noexcept;

// Runs body, turning exceptions into a status and the thread's last error.
template <class Body>
attune_status guarded(Body&& body) noexcept {
  try {
    body();
    return ATTUNE_OK;
  } catch (const Failure& e) {
    set_last_error(e.what());
    return e.status();
  } catch (const std::bad_alloc&) {
    set_last_error("out of host memory");
    return ATTUNE_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return ATTUNE_INTERNAL;
  } catch (...) {
    set_last_error("unknown exception");
    return ATTUNE_INTERNAL;
  }
}

}  // namespace attune
