//! Simulates seed after seed until it is told to stop, or a promise is broken.
//!
//! `ci/soak [--seconds N] [--from SEED] [--count N] [--preset NAME]`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use kvferry::sim::{Preset, Scenario, Stats, run};

/// Between two lines of progress.
const REPORT: Duration = Duration::from_secs(10);

struct Options {
    seconds: u64,
    from: u64,
    count: u64,
    preset: Option<Preset>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { seconds: u64::MAX, from: 0, count: u64::MAX, preset: None };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value"))?;
        let number = || value.parse().map_err(|error| format!("{name} {value}: {error}"));
        match name.as_str() {
            "--seconds" => options.seconds = number()?,
            "--from" => options.from = number()?,
            "--count" => options.count = number()?,
            "--preset" => {
                let preset = Preset::named(&value);
                options.preset = Some(preset.ok_or_else(|| format!("no preset {value}"))?);
            }
            _ => return Err(format!("no option {name}")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!(
                "{error}\nusage: soak [--seconds N] [--from SEED] [--count N] [--preset NAME]"
            );
            return ExitCode::from(2);
        }
    };
    let (start, mut total, mut seeds) = (Instant::now(), Stats::default(), 0u64);
    let mut reported = start;
    // A panic is a violation, and shown as one.
    std::panic::set_hook(Box::new(|_| {}));
    while seeds < options.count && start.elapsed().as_secs() < options.seconds {
        let seed = options.from.wrapping_add(seeds);
        let scenario = match options.preset {
            Some(preset) => Scenario::of(preset, seed),
            None => Scenario::any(seed),
        };
        match run(seed, &scenario) {
            Ok(stats) => total.add(&stats),
            Err(violation) => {
                eprintln!("{violation}");
                return ExitCode::FAILURE;
            }
        }
        seeds += 1;
        if reported.elapsed() > REPORT {
            reported = Instant::now();
            report(seeds, seed, start, &total);
        }
    }
    report(seeds, options.from.wrapping_add(seeds), start, &total);
    ExitCode::SUCCESS
}

fn report(seeds: u64, next: u64, start: Instant, total: &Stats) {
    let seconds = start.elapsed().as_secs_f64();
    let hours = total.virtual_us as f64 / 3.6e9;
    println!(
        "{seeds} seeds to {next} in {seconds:.0} s: {hours:.2} virtual hours, {} steps, {} replays, \
         {} fences, {} lanes lost, {} late; ends {:?}",
        total.steps, total.replays, total.fences, total.lanes_lost, total.late, total.ends
    );
}
