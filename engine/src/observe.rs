//! What is seen from outside: a line and a few numbers a room, the worker's counters now and then.
//! All of it happens on the control plane's thread.

use std::sync::Arc;

use crate::ids::RoomState;
use crate::room::cell::RoomCell;
use crate::wire::message::LaneIo;
use crate::worker::stats::SharedStats;

/// A room has ended: logged in its span, and counted.
pub(crate) fn room_ended(cell: &RoomCell) {
    let bound = cell.bound();
    let role = cell.role.to_string();
    let span = tracing::info_span!(
        "room",
        id = cell.room.0,
        epoch = bound.map(|bound| bound.epoch.0),
        role = %role,
        peer = bound.map(|bound| tracing::field::display(bound.peer)),
    );
    let _entered = span.enter();
    let landed = cell.landed();
    let (waited_us, _, transfer_us) = cell.timings_us(0);
    match cell.verdict() {
        Some(Err(failure)) => {
            tracing::warn!("{failure}");
            metrics::counter!("kvferry_rooms_total", "role" => role, "outcome" => "failed", "kind" => failure.kind.slug())
                .increment(1);
        }
        _ => {
            debug_assert_eq!(cell.state(), RoomState::Success);
            tracing::debug!(
                page_writes = landed.page_writes,
                bytes = landed.bytes,
                waited_us,
                transfer_us,
                "done"
            );
            metrics::counter!("kvferry_rooms_total", "role" => role.clone(), "outcome" => "done", "kind" => "").increment(1);
            metrics::histogram!("kvferry_room_transfer_seconds", "role" => role)
                .record(transfer_us as f64 / 1e6);
        }
    }
}

/// Publishes the worker's counters through the `metrics` facade, and how it drives its lanes.
pub(crate) fn publish(engine: &Arc<str>, io: LaneIo, stats: &SharedStats) {
    metrics::gauge!("kvferry_lane_io", "engine" => Arc::clone(engine), "io" => io.to_string())
        .set(1.0);
    stats.read().each(|name, value| {
        metrics::counter!(name, "engine" => Arc::clone(engine)).absolute(value)
    });
}
