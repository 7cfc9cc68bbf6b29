// A thread that does one job at a time while its owner goes on.

#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace paceline {

// Begins, waits and ends from one thread. Without a job the helper sleeps; before the first one there is no thread.
class Helper {
 public:
  Helper() = default;
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  ~Helper() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // Begin a job, when the one before is done.
  void begin(std::function<void()> job) {
    wait();
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    {
      const std::lock_guard lock(mutex_);
      job_ = std::move(job);
      is_busy_ = true;
    }
    changed_.notify_all();
  }

  // Until the job is done, if there is one. Throws what it threw, once.
  void wait() {
    if (!thread_.joinable()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !is_busy_; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return is_busy_ || ends_; });
      if (!is_busy_) return;
      const std::function<void()> job = std::move(job_);
      lock.unlock();
      std::exception_ptr failure;
      try {
        job();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = failure;
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> job_;
  std::exception_ptr failure_;
  bool is_busy_ = false;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace paceline
