//! `cargo bench --bench pool`, after `make build`: pairs of malloc and free, beside glibc's, on simcuda. The library is preloaded;
//! `GPUPOOL_BENCH_PRELOAD=0` only opens it.

mod common;

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{Churn, Gpu, Pool, Ptr, Runtime, child, glibc_pair, thread_pairs, thread_sizes};
use criterion::{BenchmarkId, Criterion, Throughput};

fn hot(c: &mut Criterion, pool: &Pool, gpu: &Gpu) {
    let (mut group, stream) = (c.benchmark_group("hot pair"), gpu.stream());
    for size in [512, 64 << 10, 1 << 20] {
        group.bench_function(BenchmarkId::from_parameter(size), |b| {
            b.iter(|| pool.free(black_box(pool.malloc(black_box(size), stream)), stream))
        });
    }
    group.bench_function("512, glibc", |b| b.iter(|| glibc_pair(512)));
    group.finish();
}

fn random(c: &mut Criterion, pool: &Pool, gpu: &Gpu) {
    let (mut group, stream) = (c.benchmark_group("random sizes, live"), gpu.stream());
    for live in [100, 1_000, 10_000] {
        let churn = Churn::draw(live, 1 << 17);
        let mut blocks: Vec<Ptr> = churn.start.iter().map(|&size| pool.malloc(size, stream)).collect();
        let mut steps = churn.steps.iter().cycle();
        group.bench_function(BenchmarkId::from_parameter(live), |b| {
            b.iter(|| {
                let &(at, size) = steps.next().expect("a cycle has no end");
                pool.free(blocks[at], stream);
                blocks[at] = pool.malloc(size, stream);
            })
        });
        blocks.into_iter().for_each(|p| pool.free(p, stream));
        pool.trim();
    }
    group.finish();
}

/// An iteration is a pair on every thread.
fn threads(c: &mut Criterion, pool: &Pool, gpu: &Gpu) {
    let mut group = c.benchmark_group("threads");
    for count in [1, 2] {
        let streams: Vec<_> = (0..count).map(|_| gpu.stream()).collect();
        let run = |pairs: u64| -> Duration {
            let (go, done) = (Barrier::new(count + 1), Barrier::new(count + 1));
            std::thread::scope(|scope| {
                for (i, &stream) in streams.iter().enumerate() {
                    let (go, done) = (&go, &done);
                    scope.spawn(move || {
                        gpu.enter();
                        let (start, sizes) = thread_sizes(i);
                        let mut live = start.map(|size| pool.malloc(size, stream));
                        go.wait();
                        thread_pairs(pool, stream, pairs, &sizes, &mut live);
                        done.wait();
                        live.into_iter().for_each(|p| pool.free(p, stream));
                    });
                }
                go.wait();
                let start = Instant::now();
                done.wait();
                start.elapsed()
            })
        };
        group.throughput(Throughput::Elements(count as u64));
        group.bench_function(BenchmarkId::from_parameter(count), |b| b.iter_custom(run));
    }
    group.finish();
}

fn without_stream(c: &mut Criterion) {
    let mut group = c.benchmark_group("cudaMalloc and cudaFree");
    let runtime = Runtime::open();
    for size in [512, 1 << 20] {
        group.bench_function(BenchmarkId::from_parameter(size), |b| b.iter(|| runtime.pair(black_box(size))));
    }
    group.finish();
}

fn main() {
    if !common::is_child() {
        let preload = std::env::var_os("GPUPOOL_BENCH_PRELOAD").is_none_or(|v| v != "0");
        eprintln!(
            "pool: {} {}",
            common::library().display(),
            if preload { "preloaded" } else { "opened, not preloaded" }
        );
        let status = child(preload).args(std::env::args_os().skip(1)).status().expect("this program runs again");
        std::process::exit(status.code().unwrap_or(1));
    }
    let (gpu, pool) = (Gpu::open(), Pool::open());
    let brief = |c: Criterion| c.warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    let mut c = brief(Criterion::default()).configure_from_args();
    hot(&mut c, &pool, &gpu);
    random(&mut c, &pool, &gpu);
    threads(&mut c, &pool, &gpu);
    without_stream(&mut c);
    c.final_summary();
}
