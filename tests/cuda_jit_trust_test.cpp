// SPDX-License-Identifier: Apache-2.0
// What others may have written is not run. Any user can make a directory in a shared place before we do, leave a pipe
// in it, or change a file that was left writable.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <functional>
#include <future>

#include "cuda/jit/bundle.h"
#include "cuda/jit/disk_cache.h"
#include "cuda/jit/files.h"
#include "jit_fixture.h"

namespace attune::cuda {
namespace {

using testing::HasSubstr;

class CudaJitTrust : public CudaJit {
 protected:
  static constexpr uid_t kOther = 12345;

  void SetUp() override {
    CudaJit::SetUp();
    DiskCache(path("cache")).store(key_, "machine code");
  }
  std::optional<std::string> load() const { return DiskCache(path("cache")).load(key_); }
  std::string entry() const { return DiskCache(path("cache")).path_of(key_); }
  // The cache, what is in it, and the entry.
  std::vector<std::string> levels() const {
    const fs::path file = entry();
    return {path("cache"), path("cache/kernels"), file.parent_path().string(), file.string()};
  }
  // True unless body waits for a pipe, which is then given a writer so that the test ends.
  static bool returns(const std::string& pipe, const std::function<void()>& body) {
    std::future<void> done = std::async(std::launch::async, body);
    bool returned = done.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    while (done.wait_for(std::chrono::milliseconds(10)) != std::future_status::ready)
      close(open(pipe.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC));
    return returned;
  }

  const Digest key_ = sha256("key");
};

TEST_F(CudaJitTrust, WhatIsMadeIsPrivate) {
  const mode_t mask = umask(0);
  const std::string cache = path("deep/er/cache");
  DiskCache(cache).store(key_, "machine code");
  umask(mask);
  for (const std::string& made : {path("deep"), path("deep/er"), cache, cache + "/kernels", cache + "/tmp"})
    EXPECT_EQ(fs::status(made).permissions(), fs::perms::owner_all) << made;
  EXPECT_EQ(fs::status(DiskCache(cache).path_of(key_)).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_TRUE(log_.empty()) << log_[0];
}

TEST_F(CudaJitTrust, WhatOthersCanWriteIsNotTaken) {
  for (const std::string& level : levels()) {
    struct stat before;
    ASSERT_EQ(stat(level.c_str(), &before), 0);
    for (const mode_t extra : {020, 002, 01022}) {
      ASSERT_EQ(chmod(level.c_str(), before.st_mode | extra), 0);
      log_.clear();
      EXPECT_EQ(load(), std::nullopt) << level << " " << extra;
      ASSERT_EQ(log_.size(), 1u) << level << " " << extra;
      EXPECT_THAT(log_[0], HasSubstr(cat(level, " can be written by other users (mode ")));
      EXPECT_THAT(log_[0], HasSubstr("chmod go-w"));
    }
    ASSERT_EQ(chmod(level.c_str(), before.st_mode), 0);
    log_.clear();
    EXPECT_EQ(load(), "machine code") << level;
    EXPECT_TRUE(log_.empty()) << log_[0];
  }
}

TEST_F(CudaJitTrust, NothingIsWrittenWhereOthersCanWrite) {
  // The reason is said once, whatever is asked first and how often.
  for (const char* level : {"cache", "cache/kernels", "cache/tmp"}) {
    fs::remove_all(path("cache"));
    fs::create_directories(path(level));
    fs::permissions(path("cache"), fs::perms::owner_all);
    fs::permissions(path(level), fs::perms::all);
    log_.clear();
    DiskCache cache(path("cache"));
    EXPECT_EQ(cache.load(key_), std::nullopt);
    cache.store(key_, "machine code");
    cache.store(key_, "machine code");
    EXPECT_EQ(cache.load(key_), std::nullopt);
    EXPECT_FALSE(fs::exists(cache.path_of(key_))) << level;
    ASSERT_EQ(log_.size(), 1u) << level;
    EXPECT_THAT(log_[0], HasSubstr(cat(path(level), " can be written by other users (mode 0777)")));
    EXPECT_THAT(log_[0], HasSubstr("ATTUNE_CACHE_DIR"));
  }
}

TEST_F(CudaJitTrust, WhatAnotherUserOwnsIsNotTaken) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  for (const std::string& level : levels()) {
    ASSERT_EQ(chown(level.c_str(), kOther, static_cast<gid_t>(-1)), 0);
    log_.clear();
    EXPECT_EQ(load(), std::nullopt) << level;
    ASSERT_EQ(log_.size(), 1u) << level;
    EXPECT_THAT(log_[0], HasSubstr(cat(level, " is owned by user 12345; only what user 0 owns is taken")));
    ASSERT_EQ(chown(level.c_str(), 0, static_cast<gid_t>(-1)), 0);
    log_.clear();
    EXPECT_EQ(load(), "machine code") << level;
  }
  // Root may give all users a cache; another user may not.
  for (const std::string& level : levels()) ASSERT_EQ(chmod(level.c_str(), level == entry() ? 0644 : 0755), 0);
  ASSERT_EQ(seteuid(kOther), 0);
  const std::optional<std::string> of_root = load();
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(of_root, "machine code");
  ASSERT_EQ(chown(path("cache").c_str(), kOther + 1, static_cast<gid_t>(-1)), 0);
  log_.clear();
  ASSERT_EQ(seteuid(kOther), 0);
  const std::optional<std::string> of_another = load();
  ASSERT_EQ(seteuid(0), 0);
  EXPECT_EQ(of_another, std::nullopt);
  ASSERT_EQ(log_.size(), 1u);
  EXPECT_THAT(log_[0], HasSubstr("is owned by user 12346; only what user 12345 or root owns is taken"));
}

TEST_F(CudaJitTrust, PipesAreNotWaitedFor) {
  for (const std::string& level : levels()) {
    fs::remove_all(level);
    ASSERT_EQ(mkfifo(level.c_str(), 0600), 0);
    log_.clear();
    EXPECT_TRUE(returns(level, [&] { EXPECT_EQ(load(), std::nullopt); })) << level;
    ASSERT_EQ(log_.size(), 1u) << level;
    EXPECT_THAT(log_[0], HasSubstr(level));
    EXPECT_THAT(log_[0], HasSubstr(level == entry() ? "is not a regular file" : "Not a directory"));
    if (level == entry()) break;
    fs::remove(level);
    DiskCache(path("cache")).store(key_, "machine code");
  }
  // What is no entry is replaced by one.
  DiskCache(path("cache")).store(key_, "machine code");
  EXPECT_EQ(load(), "machine code");

  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::string why;
  EXPECT_TRUE(returns(pipe, [&] { EXPECT_EQ(Bundle::open(pipe, &why), nullptr); }));
  EXPECT_EQ(why, cat("the kernel bundle ", pipe, " is not a regular file; it is not used"));
  EXPECT_TRUE(returns(pipe, [&] { EXPECT_EQ(read_file(pipe), std::nullopt); }));
}

TEST_F(CudaJitTrust, LinksInsideTheCacheAreNotFollowed) {
  const std::vector<std::string> all = levels();
  for (size_t i = 1; i < all.size(); ++i) {
    fs::rename(all[i], path("elsewhere"));
    fs::create_symlink(path("elsewhere"), all[i]);
    log_.clear();
    EXPECT_EQ(load(), std::nullopt) << all[i];
    ASSERT_EQ(log_.size(), 1u) << all[i];
    EXPECT_THAT(log_[0], HasSubstr(all[i]));
    fs::remove(all[i]);
    fs::rename(path("elsewhere"), all[i]);
  }
  // The cache itself may be one: on another disk, say.
  fs::rename(path("cache"), path("elsewhere"));
  fs::create_symlink(path("elsewhere"), path("cache"));
  EXPECT_EQ(load(), "machine code");
}

TEST_F(CudaJitTrust, StaleTemporariesAreRemoved) {
  const auto age = [&](const std::string& name, int hours) {
    const timespec then = {time(nullptr) - hours * 3600, 0};
    const timespec times[] = {then, then};
    ASSERT_EQ(utimensat(AT_FDCWD, path("cache/tmp/" + name).c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  };
  const auto write_aged = [&](const std::string& name, int hours) {
    write_file(path("cache/tmp/" + name), "part of a kernel");
    age(name, hours);
  };
  write_aged("entry-a1B2c3", 30);
  write_aged("entry-0123456789abcdef", 2000);
  write_aged("entry-d4E5f6", 20);      // another process may be at it
  write_aged("entry-d4E5f6.txt", 30);  // not ours
  write_aged("entries", 30);
  write_aged("notes/entry-a1B2c3", 30);
  fs::create_directory(path("cache/tmp/entry-d1d1d1"));
  age("entry-d1d1d1", 30);
  write_file(path("kept"), "a file elsewhere");
  fs::create_symlink(path("kept"), path("cache/tmp/entry-e1e1e1"));
  age("entry-e1e1e1", 30);
  DiskCache(path("cache")).store(key_, "machine code");
  std::vector<std::string> left;
  for (const auto& file : fs::directory_iterator(path("cache/tmp"))) left.push_back(file.path().filename().string());
  EXPECT_THAT(left, testing::UnorderedElementsAre("entry-d4E5f6", "entry-d4E5f6.txt", "entries", "notes",
                                                  "entry-d1d1d1", "entry-e1e1e1"));
  EXPECT_TRUE(fs::exists(path("kept")));
  EXPECT_TRUE(fs::exists(path("cache/tmp/notes/entry-a1B2c3")));
  EXPECT_TRUE(log_.empty()) << log_[0];
}

}  // namespace
}  // namespace attune::cuda
