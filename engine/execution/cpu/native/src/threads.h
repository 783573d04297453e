// A team of threads that runs a sequence of operations, each cut into chunks.
//
// Threads claim chunks one by one, and whoever finishes the last chunk of an operation publishes the next. Nobody waits
// at a barrier for a thread to arrive: one that loses its core delays the chunk it holds and nothing else. Those without
// work spin for some microseconds, then give their core away, then sleep. Knows nothing of what a chunk computes.
#pragma once

#include <stdint.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace tide {

class Job {
public:
    virtual ~Job() = default;
    virtual int64_t num_ops() const = 0;
    // Chunks of an operation, 0: nothing to do. Called once, in order, before its chunks run.
    virtual int64_t begin(int64_t op, int threads) = 0;
    virtual void run(int64_t op, int64_t chunk, int thread) = 0;
    // Called on a thread before its first chunk of the job. Returns the function that the thread calls before it enters
    // another job or sleeps; the job may be gone then.
    using Leave = void (*)();
    virtual Leave enter() { return nullptr; }
};

class Team {
public:
    static constexpr int MAX_THREADS = 256;
    static constexpr int64_t MAX_CHUNKS = 65535;  // of an operation

    explicit Team(int threads);
    ~Team();
    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    void run(Job &job);        // the caller is one of the threads; one job at a time
    void resize(int threads);  // from the next job on
    int size() const { return size_; }
    void stop();    // ends the threads; the next job starts them again
    void lock();    // no job until unlock
    void unlock();

private:
    struct alignas(64) Range {
        std::atomic<uint64_t> word{0};      // sequence number of an operation: 48 bits | next chunk: 16
        std::atomic<uint32_t> end[2] = {};  // behind the last chunk, of even and odd sequence numbers
    };

    struct Entered {  // the job that a thread has entered last
        uint64_t number = 0;
        Job::Leave leave = nullptr;
        void end();
    };

    void publish();
    bool claim(int thread, Entered &entered);
    bool has_work() const;
    void work(int thread, uint64_t number);
    void sleep(uint64_t number);
    void ring();
    void start();
    void join();

    std::mutex running_;
    std::atomic<int> size_;
    int started_for_ = 1;
    std::vector<std::thread> workers_;
    std::atomic<int> threads_{1};  // of the current job

    // Written by whoever publishes, one at a time.
    Job *job_ = nullptr;
    uint64_t number_ = 0;  // of the current job
    uint64_t seq_ = 0;
    int64_t next_op_ = 0;

    Range ranges_[MAX_THREADS];
    std::atomic<int64_t> op_[2] = {}, total_[2] = {};  // of even and odd sequence numbers
    alignas(64) std::atomic<int64_t> done_{0};         // chunks of the current operation
    alignas(64) std::atomic<uint64_t> finished_{0};    // the last job that has ended
    alignas(64) std::atomic<uint32_t> bell_{0};        // changes when sleepers are to look again
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace tide
