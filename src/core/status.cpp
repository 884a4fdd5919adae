// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <mutex>

namespace attune {
namespace {

// A fixed buffer: reporting an error must not run out of memory.
thread_local char t_last_error[2048] = "";

std::mutex g_log_mutex;
attune_log_callback g_log_callback = nullptr;
void* g_log_user = nullptr;

}  // namespace

void check_workspace(const char* who, size_t need, const void* workspace, size_t bytes) {
  constexpr size_t kAlignment = 256;
  if (bytes < need) {
    fail(ATTUNE_WORKSPACE_TOO_SMALL, "workspace_bytes is ", bytes, "; ", who, " needs ", need, ", ", need - bytes,
         " more");
  }
  require(workspace != nullptr, "workspace is null; ", who, " needs ", need, " bytes");
  const size_t over = reinterpret_cast<uintptr_t>(workspace) % kAlignment;
  require(over == 0, "workspace is ", over, " bytes beyond a multiple of ", kAlignment, "; it must be a multiple");
}

void set_last_error(const char* message) noexcept {
  size_t i = 0;
  for (; message[i] != '\0' && i + 1 < sizeof(t_last_error); ++i) t_last_error[i] = message[i];
  t_last_error[i] = '\0';
}

const char* last_error() noexcept { return t_last_error; }

void set_log_callback(attune_log_callback callback, void* user) {
  std::lock_guard lock(g_log_mutex);
  g_log_callback = callback;
  g_log_user = user;
}

void log_message(attune_log_level level, const std::string& message) {
  attune_log_callback callback;
  void* user;
  {
    std::lock_guard lock(g_log_mutex);
    callback = g_log_callback;
    user = g_log_user;
  }
  if (callback != nullptr) callback(level, message.c_str(), user);
}

}  // namespace attune
