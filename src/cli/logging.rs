//! The logging flags that all Kubernetes components share.

use super::go_flags::parse_bool;
use crate::config::go_duration::GoDuration;
use crate::config::go_integer::level;
use crate::telemetry::{Format, LogSettings, VModule};
use clap::Args;
use tracing::info;

/// Flattened into each command that takes a sidecar's place.
#[derive(Debug, Args)]
pub struct LoggingFlags {
    /// Log verbosity: 4 logs each call, 5 more
    #[arg(long, value_name = "LEVEL", default_value = "0", allow_negative_numbers = true, value_parser = level, help_heading = "Logging")]
    v: i32,
    /// Verbosity by source file, such as socket=4,server=5 (text format only)
    #[arg(long, value_name = "PATTERN=N,…", default_value = "", hide_default_value = true, help_heading = "Logging")]
    vmodule: VModule,
    /// text or json; both go to stderr
    #[arg(long, value_name = "FORMAT", default_value = "text", help_heading = "Logging")]
    logging_format: String,
    /// Must be above zero. Every line is written at once, so there is never anything to flush
    #[arg(long, value_name = "DURATION", default_value = "5s", help_heading = "Logging")]
    log_flush_frequency: GoDuration,
    /// An alpha option that the replaced registrar refuses, and so do we
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, hide = true)]
    log_text_split_stream: bool,
    /// As --log-text-split-stream
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, hide = true)]
    log_json_split_stream: bool,
    /// As --log-text-split-stream
    #[arg(long, value_name = "QUANTITY", default_value = "0", hide = true)]
    log_text_info_buffer_size: String,
    /// As --log-text-split-stream
    #[arg(long, value_name = "QUANTITY", default_value = "0", hide = true)]
    log_json_info_buffer_size: String,
    /// Logs that there is nothing to adjust to the CPU quota; kept for manifests that set it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = parse_bool, action = clap::ArgAction::Set, help_heading = "Logging")]
    automaxprocs: bool,
}

impl LoggingFlags {
    /// What they say, checked as the replaced sidecars check it.
    ///
    /// # Errors
    /// The first flag that cannot be.
    pub fn settings(&self) -> anyhow::Result<LogSettings> {
        let format = match self.logging_format.as_str() {
            "text" => Format::Text,
            "json" => Format::Json,
            other => anyhow::bail!("--logging-format={other:?} is unknown: use text or json"),
        };
        if format == Format::Json && !self.vmodule.is_empty() {
            anyhow::bail!("--vmodule works only with --logging-format=text");
        }
        if self.log_flush_frequency.0.is_zero() {
            anyhow::bail!("--log-flush-frequency must be above zero");
        }
        let alpha = [
            ("--log-text-split-stream", self.log_text_split_stream),
            ("--log-json-split-stream", self.log_json_split_stream),
            ("--log-text-info-buffer-size", !is_zero_quantity(&self.log_text_info_buffer_size)),
            ("--log-json-info-buffer-size", !is_zero_quantity(&self.log_json_info_buffer_size)),
        ];
        if let Some((flag, _)) = alpha.iter().find(|(_, set)| *set) {
            anyhow::bail!("{flag} is an alpha option that cannot be switched on here, as upstream: leave it out");
        }
        Ok(LogSettings { verbosity: self.v, vmodule: self.vmodule.clone(), format })
    }

    /// Answers `--automaxprocs` in the log.
    pub fn tell_maxprocs(&self) {
        if self.automaxprocs {
            info!("maxprocs: one thread carries all work, so there is nothing to adjust to the CPU quota");
        }
    }
}

fn is_zero_quantity(text: &str) -> bool {
    let digits = text.trim_end_matches(|char: char| char.is_ascii_alphabetic());
    !digits.is_empty() && digits.bytes().all(|byte| matches!(byte, b'0' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_of_zero_are_zero() {
        for zero in ["0", "0Ki", "0.0"] {
            assert!(is_zero_quantity(zero), "{zero}");
        }
        for other in ["1", "16Mi", "", "Ki"] {
            assert!(!is_zero_quantity(other), "{other}");
        }
    }
}
