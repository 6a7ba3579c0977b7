//! Messages. Nothing is printed unless `GPUPOOL_LOG` asks for it, but for one warning a bad setting.
//!
//! The `log` facade is compiled into this library and private to it: setting its logger does not touch a host program that
//! is written in Rust itself.

use log::LevelFilter;

/// Installs the logger; later calls do nothing.
pub fn init(level: LevelFilter) {
    if level == LevelFilter::Off {
        return;
    }
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level).format(|out, record| {
        use std::io::Write;
        writeln!(out, "gpupool: {}: {}", record.level().as_str().to_lowercase(), record.args())
    });
    let _ = builder.try_init();
}

/// One line to standard error, whatever the level: for settings that cannot be taken as they are.
pub fn warn_always(message: &str) {
    use std::io::Write;
    // Not eprintln, which panics where standard error cannot be written: a closed pipe must not cost the program its memory.
    let _ = writeln!(std::io::stderr(), "gpupool: warning: {message}");
}
