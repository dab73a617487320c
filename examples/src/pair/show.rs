//! What a person sees: progress on stderr, one table, the texts; or lines of JSON for something
//! outside that checks the pair's word.

use anyhow::Result;
use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::Fault;
use super::check::{Checked, Outcome};
use super::run::{Release, Run, Side};
use crate::model::Model;
use crate::protocol::{Ready, RoomLine};

/// Characters of a prompt and of a text that are shown.
const SHOWN_CHARS: usize = 160;

/// Says on stderr how far things are.
pub(super) fn progress(what: &str) {
    eprintln!("pd-pair: {what}");
}

/// A room's line as a side said it, and whether its pages were released there.
#[derive(Serialize)]
struct RoomJson<'a> {
    #[serde(flatten)]
    line: &'a RoomLine,
    released: bool,
    /// On prefill, of a room given up there: microseconds from then to its release.
    after_abort_us: Option<u64>,
    /// On prefill: pages overwritten when the room was released.
    overwritten: usize,
    /// Pages that an earlier room had which failed.
    again: usize,
}

/// The last line.
#[derive(Serialize)]
struct SummaryJson<'a> {
    rooms: usize,
    done: usize,
    failed: usize,
    wrong: Vec<&'a str>,
    fault: Option<String>,
    /// What was seen of what was promised.
    claims: &'a [String],
}

/// A line a room from each side, then the summary.
pub(super) fn json(
    runs: &[Run],
    Checked(outcomes): &Checked,
    fault: Option<Fault>,
    claims: &[String],
) -> Result<()> {
    for side in runs.iter().flat_map(|run| [&run.sender, &run.receiver]) {
        let Side { line: Some((line, _)), release, again } = side else { continue };
        let released = release.is_some();
        let Release { after_abort, overwritten } = release.unwrap_or_default();
        let after_abort_us = after_abort.map(|after| after.as_micros() as u64);
        let room = RoomJson { line, released, after_abort_us, overwritten, again: *again };
        println!("{}", serde_json::to_string(&room)?);
    }
    let summary = SummaryJson {
        rooms: runs.len(),
        done: outcomes.iter().filter(|outcome| **outcome == Outcome::Equal).count(),
        failed: outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_))).count(),
        wrong: outcomes
            .iter()
            .filter_map(
                |outcome| if let Outcome::Wrong(why) = outcome { Some(why.as_str()) } else { None },
            )
            .collect(),
        fault: fault.and_then(|fault| Some(fault.to_possible_value()?.get_name().to_owned())),
        claims,
    };
    println!("{}", serde_json::json!({ "summary": summary }));
    Ok(())
}

/// The table, a row a room, by the sender's numbers.
pub(super) fn table(runs: &[Run], Checked(outcomes): &Checked, readys: &[Ready]) {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    let heads = [
        "room",
        "to",
        "prompt tokens",
        "pages",
        "bytes",
        "transfer ms",
        "GB/s",
        "fabric",
        "outcome",
        "",
    ];
    table.set_header(heads);
    for column in 2..=6 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for (run, outcome) in runs.iter().zip(outcomes) {
        let line = run.sender.line.as_ref().map(|(line, _)| line);
        let (ms, rate) = line.map_or_else(Default::default, |line| {
            let seconds = line.transfer_us as f64 / 1e6;
            let rate = if line.bytes == 0 {
                "-".to_owned()
            } else {
                format!("{:.3}", line.bytes as f64 / seconds / 1e9)
            };
            (format!("{:.1}", seconds * 1e3), rate)
        });
        let cell = |of: fn(&RoomLine) -> String| line.map_or_else(|| "?".to_owned(), of);
        table.add_row([
            run.plan.room.to_string(),
            readys.get(run.decode + 1).map_or_else(String::new, |ready| ready.name.clone()),
            run.plan.tokens.len().to_string(),
            cell(|line| line.pages.to_string()),
            cell(|line| line.bytes.to_string()),
            ms,
            rate,
            cell(|line| line.fabric.clone().unwrap_or_else(|| "-".to_owned())),
            outcome.to_string(),
            run.plan.what.label().to_owned(),
        ]);
    }
    println!("{table}");
    println!(
        "transfer: from a room's first page to the word that all landed. Its chunks are computed \
         meanwhile, so these rates are the model's, not the fabric's."
    );
}

/// The texts that were generated.
pub(super) fn texts(runs: &[Run], model: &Model) {
    println!();
    for run in runs {
        let Some((tokens, text)) = &run.text else { continue };
        println!("room {}: {}", run.plan.room, shortened(&run.plan.prompt));
        println!("  -> {} [{} tokens]", shortened(text), tokens.len());
    }
    if matches!(model.tokenizer(), crate::model::Tokenizer::Bytes) {
        println!("(made-up weights speak no language: see --model)");
    }
}

/// The failure lines, as each side said them.
pub(super) fn failures(runs: &[Run]) {
    for run in runs {
        for (side, name) in [(&run.sender, "prefill"), (&run.receiver, "decode")] {
            if let Some(line) = side.failed().and_then(|(line, _)| line.line.as_ref()) {
                println!("{name}: {line}");
            }
        }
    }
}

/// On one line, the end of it where it is long: a prompt's question stands last.
fn shortened(text: &str) -> String {
    let line = text.trim().replace(char::is_control, " ");
    match line.char_indices().rev().nth(SHOWN_CHARS) {
        Some((at, c)) => format!("…{}", &line[at + c.len_utf8()..]),
        None => line,
    }
}
