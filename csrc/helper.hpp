// A thread that does one job at a time while its owner goes on.

#pragma once

#include <unistd.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace paceline {

// Begins, waits and ends from one thread. Without a job the helper sleeps; before the first one there is no thread. In a
// forked child, which has no thread but the one that forked, it begins anew.
class Helper {
 public:
  Helper() = default;
  Helper(const Helper&) = delete;
  Helper& operator=(const Helper&) = delete;

  ~Helper() {
    leave_parents();
    if (!shared_) return;
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->ends = true;
    }
    shared_->changed.notify_all();
    shared_->thread.join();
  }

  // Begin a job, when the one before is done.
  void begin(std::function<void()> job) {
    wait();
    if (!shared_) {
      auto shared = std::make_unique<Shared>();
      shared->thread = std::thread([&own = *shared] { own.work(); });
      shared_ = std::move(shared);
      owner_ = getpid();
    }
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->job = std::move(job);
      shared_->is_busy = true;
    }
    shared_->changed.notify_all();
  }

  // Until the job is done, if there is one. Throws what it threw, once.
  void wait() {
    leave_parents();
    if (!shared_) return;
    std::unique_lock lock(shared_->mutex);
    shared_->changed.wait(lock, [this] { return !shared_->is_busy; });
    if (shared_->failure) std::rethrow_exception(std::exchange(shared_->failure, nullptr));
  }

 private:
  struct Shared {
    void work() {
      std::unique_lock lock(mutex);
      for (;;) {
        changed.wait(lock, [this] { return is_busy || ends; });
        if (!is_busy) return;
        const std::function<void()> current = std::move(job);
        lock.unlock();
        std::exception_ptr thrown;
        try {
          current();
        } catch (...) {
          thrown = std::current_exception();
        }
        lock.lock();
        failure = thrown;
        is_busy = false;
        changed.notify_all();
      }
    }

    std::mutex mutex;
    std::condition_variable changed;
    std::function<void()> job;
    std::exception_ptr failure;
    bool is_busy = false;
    bool ends = false;
    std::thread thread;
  };

  // The thread is the parent's, and so is whatever it holds: to join it, or to destroy what it waits for, would never
  // end.
  void leave_parents() {
    if (shared_ && getpid() != owner_) static_cast<void>(shared_.release());
  }

  std::unique_ptr<Shared> shared_;
  pid_t owner_ = 0;
};

}  // namespace paceline
