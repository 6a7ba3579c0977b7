//! The settings of this process. Which there are, and how they are read, says `settings`, which the gpupool command uses too.
//!
//! They come from the environment, once, at first use. A bad value warns once and keeps the default, and so does a name that is
//! nearly a setting's; a process that runs with raised privileges (setuid) reads none.

mod settings;

use once_cell::sync::Lazy;

pub use settings::{Backing, Config, FreeMode};

/// The settings of this process.
pub fn get() -> &'static Config {
    static CONFIG: Lazy<Config> = Lazy::new(|| {
        // SAFETY: getauxval reads a number that the kernel left; AT_SECURE is 0 or 1.
        let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
        let environment = if secure { Vec::new() } else { settings::environment() };
        let (config, warnings) = settings::parse(&environment);
        warnings.iter().chain(&settings::misspelt(&environment)).for_each(|w| crate::log::warn_always(w));
        crate::log::init(config.log);
        config
    });
    &CONFIG
}
