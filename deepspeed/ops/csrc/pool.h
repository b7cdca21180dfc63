// Threads that wait for work, one job at a time. A child of fork() has none of them and starts its own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>

namespace pool {

struct Job {
    virtual void work() = 0;  // called by several threads at once; returns when nothing is left to claim
};

class Pool {
  public:
    // The job has been done when this returns; the caller works too.
    void run(Job* job, int threads) {
        pthread_mutex_lock(&turn_);
        while (started_ < threads - 1 && start()) started_++;
        pthread_mutex_lock(&lock_);
        job_ = job;
        places_ = threads - 1;
        number_++;
        pthread_mutex_unlock(&lock_);
        pthread_cond_broadcast(&begin_);
        job->work();
        pthread_mutex_lock(&lock_);
        job_ = nullptr;  // who wakes up only now finds nothing, and nobody waits for them
        while (active_) pthread_cond_wait(&end_, &lock_);
        pthread_mutex_unlock(&lock_);
        pthread_mutex_unlock(&turn_);
    }

  private:
    bool start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are Python's
        pthread_t thread;
        const bool made = pthread_create(&thread, nullptr, &Pool::serve, this) == 0;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (made) pthread_detach(thread);
        return made;
    }

    static void* serve(void* self) {
        static_cast<Pool*>(self)->serve();
        return nullptr;
    }

    void serve() {
        uint64_t seen = 0;
        pthread_mutex_lock(&lock_);
        for (;;) {
            while (!(job_ && places_ && seen != number_)) pthread_cond_wait(&begin_, &lock_);
            seen = number_;
            places_--;
            active_++;
            Job* job = job_;
            pthread_mutex_unlock(&lock_);
            job->work();
            pthread_mutex_lock(&lock_);
            if (--active_ == 0) pthread_cond_signal(&end_);
        }
    }

    pthread_mutex_t turn_ = PTHREAD_MUTEX_INITIALIZER, lock_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t begin_ = PTHREAD_COND_INITIALIZER, end_ = PTHREAD_COND_INITIALIZER;
    Job* job_ = nullptr;
    uint64_t number_ = 0;
    int started_ = 0, places_ = 0, active_ = 0;
};

static std::atomic<Pool*> current{nullptr};

// In a child the threads are gone and locks may be held by nobody: the old pool is left as it is.
static void forget() { current.store(nullptr); }

__attribute__((constructor)) static void watch_forks() { pthread_atfork(nullptr, nullptr, forget); }

inline void run(Job* job, int threads) {
    if (threads <= 1) return job->work();
    Pool* found = current.load();
    if (!found) {
        Pool* made = new Pool;
        found = current.compare_exchange_strong(found, made) ? made : (delete made, current.load());
    }
    found->run(job, threads);
}

}  // namespace pool
