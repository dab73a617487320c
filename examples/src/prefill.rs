//! The prefill side: computes prompts chunk by chunk, and sends each layer's pages as they come.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use kvferry::{Chunk, Granted, OpenOptions, PoolId, RoomHandle, SendRoom, WriteError};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;

use crate::carried::{AuxRow, GrantNote};
use crate::flags::{EngineArgs, ModelArgs};
use crate::model::{self, KvSequence};
use crate::node::{Follow, Node, serve};
use crate::pages::{FreeList, Page};
use crate::protocol::{Command, Event, RoomLine};
use crate::store::POISON;

/// How long to wait before a finish is tried again that found the engine's queue full.
const RETRY: Duration = Duration::from_millis(1);

/// Flags of `prefill`.
#[derive(Clone, Debug, Parser)]
#[command(
    version,
    about = "Computes prompts and sends their KV pages. Driven by lines of JSON on stdin."
)]
pub struct PrefillArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Pause between the chunks of a prompt, in milliseconds. For demonstrations: a fault then finds
    /// rooms in the middle of their transfer.
    #[arg(long, default_value_t = 0)]
    pace_ms: u64,
}

/// Runs `prefill` until its stdin ends.
///
/// # Errors
/// What keeps it from starting.
pub fn run(args: &PrefillArgs) -> Result<()> {
    let node = Node::start(&args.model, &args.engine, "prefill")?;
    serve(Prefill {
        node,
        free: FreeList::ascending(args.model.pages),
        pace: Duration::from_millis(args.pace_ms),
        rooms: Mutex::default(),
    })
}

#[derive(Debug)]
struct Prefill {
    node: Node,
    free: FreeList,
    pace: Duration,
    /// Live rooms, to be aborted.
    rooms: Mutex<HashMap<u64, Arc<Live>>>,
}

/// A room, and what its parts tell each other.
#[derive(Debug)]
struct Live {
    room: SendRoom,
    /// Whether what follows the first chunk waits for the command to resume, and the end for another
    /// one; and that command.
    hold: bool,
    resume: Notify,
    /// When it was given up here.
    aborted: OnceLock<Instant>,
    /// The pages that its bytes are read from, once taken.
    pages: OnceLock<Vec<u32>>,
}

/// The pages in which a layer of a chunk lies, as positions of the prompt's page list.
#[derive(Debug)]
struct Rows {
    chunk: usize,
    layer: usize,
    pages: Range<usize>,
}

/// What a room's parts work on.
#[derive(Debug)]
struct Job {
    live: Arc<Live>,
    tokens: Vec<u32>,
    schedule: Vec<Range<usize>>,
    pages: Vec<u32>,
}

impl Live {
    /// Waits for the command to resume, as long as there is something to go on with.
    async fn resumed(&self) {
        tokio::select! {
            () = self.resume.notified() => {}
            _ = self.room.done() => {}
        }
    }
}

impl Follow for Prefill {
    fn node(&self) -> &Node {
        &self.node
    }

    fn into_engine(self) -> kvferry::Engine {
        self.node.engine
    }

    fn follow(self: &Arc<Self>, command: Command, rooms: &mut JoinSet<()>) -> Result<()> {
        match command {
            Command::Prefill { room, prompt, hold } => {
                let tokens = self.node.tokens(&prompt, 0)?;
                let live = Arc::new(Live {
                    room: self.node.engine.open(room.into(), OpenOptions::default())?,
                    hold,
                    resume: Notify::new(),
                    aborted: OnceLock::new(),
                    pages: OnceLock::new(),
                });
                self.live().insert(room, Arc::clone(&live));
                let this = Arc::clone(self);
                rooms.spawn(async move { this.serve_room(live, tokens).await });
            }
            Command::Resume { room } => self.live_room(room)?.resume.notify_one(),
            Command::Abort { room, reason } => {
                let live = self.live_room(room)?;
                live.aborted.get_or_init(Instant::now);
                live.room.abort(&reason);
            }
            _ => bail!("not a command for prefill"),
        }
        Ok(())
    }
}

impl Prefill {
    fn live(&self) -> MutexGuard<'_, HashMap<u64, Arc<Live>>> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_room(&self, room: u64) -> Result<Arc<Live>> {
        let live = self.live().get(&room).map(Arc::clone);
        live.with_context(|| format!("there is no live room {room}"))
    }

    /// A room from its opening to its release.
    async fn serve_room(&self, live: Arc<Live>, tokens: Vec<u32>) {
        let (pages, failed) =
            tokio::join!(self.send(&live, &tokens), self.until_released(&live, tokens.len()));
        if failed {
            pages.iter().for_each(Page::mark_failed);
        }
        // Only now may another room's rows be written to them.
        drop(pages);
    }

    /// Waits for a room's end and its release, and says so. Returns whether it failed.
    async fn until_released(&self, live: &Live, prompt_tokens: usize) -> bool {
        let (room, id) = (&live.room, live.room.id().0);
        let failed = room.done().await.is_err();
        self.live().remove(&id);
        let report = room.report();
        self.node.output.say(&Event::Room(RoomLine::new(&report, prompt_tokens)));
        room.released().await;
        let after_abort = live.aborted.get().map(Instant::elapsed);
        let after_abort_us = after_abort.map(|after| after.as_micros() as u64);
        // Nothing reads them any more: that is the promise, and this makes a breach of it be seen.
        let overwritten = live.pages.get().map_or(&[][..], Vec::as_slice);
        self.node.store.fill(overwritten, f32::from_bits(POISON));
        let (epoch, overwritten) = (report.epoch.map(|epoch| epoch.0), overwritten.len());
        self.node.output.say(&Event::Released { room: id, epoch, after_abort_us, overwritten });
        failed
    }

    /// Computes and sends; returns the pages that the room's bytes are read from.
    async fn send(&self, live: &Arc<Live>, tokens: &[u32]) -> Vec<Page> {
        let room = &live.room;
        let taken = tokio::select! {
            taken = self.free.take(self.node.pages_for(tokens.len())) => taken,
            _ = room.done() => return Vec::new(),
        };
        let pages = match taken {
            Ok(pages) => pages,
            Err(error) => {
                room.abort(&format!("{error:#}"));
                return Vec::new();
            }
        };
        let (chunk_tokens, page_tokens) = (self.node.chunk_tokens, self.node.page_tokens);
        let job = Arc::new(Job {
            live: Arc::clone(live),
            schedule: model::chunks(tokens.len(), chunk_tokens, 0, page_tokens),
            tokens: tokens.to_vec(),
            pages: pages.iter().map(Page::number).collect(),
        });
        live.pages.get_or_init(|| job.pages.clone());
        let again = pages.iter().filter(|page| page.is_again()).count();
        let sourced = Event::Sourced { room: room.id().0, pages: pages.len(), again };
        self.node.output.say(&sourced);
        // At most layers x chunks of a prompt wait in it.
        let (computed, rows) = mpsc::unbounded_channel();
        let (first, written) =
            tokio::join!(self.compute(Arc::clone(&job), computed), self.write(&job, rows));
        let ended = match (first, written) {
            // The room's verdict tells why.
            _ if room.state().is_terminal() => Ok(()),
            (Ok(first), Ok(cached_pages)) => self.finish(&job, first, cached_pages).await,
            (_, Err(error)) | (Err(error), _) => Err(error),
        };
        if let Err(error) = ended {
            room.abort(&format!("{error:#}"));
        }
        pages
    }

    /// Computes the prompt on the compute thread, announcing each layer of each chunk; returns the
    /// first new token.
    async fn compute(&self, job: Arc<Job>, computed: mpsc::UnboundedSender<Rows>) -> Result<u32> {
        let (model, store) = (Arc::clone(&self.node.model), Arc::clone(&self.node.store));
        let (page_tokens, pace) = (self.node.page_tokens, self.pace);
        let compute = move || {
            let room = &job.live.room;
            let mut seq = KvSequence::new(job.pages.iter().copied());
            let last = job.schedule.len() - 1;
            let mut on_layer = |chunk: usize, layer: usize| {
                if chunk > 0 && layer == 0 {
                    std::thread::sleep(pace);
                }
                // Nobody wants the rest of a room that has failed.
                ensure!(!room.state().is_terminal(), "the room has ended");
                let tokens = &job.schedule[chunk];
                // Only the last chunk may end within a page.
                let end = if chunk == last { job.pages.len() } else { tokens.end / page_tokens };
                let pages = tokens.start / page_tokens..end;
                let rows = Rows { chunk, layer, pages };
                computed.send(rows).ok().context("its pages are not sent any more")
            };
            ensure!(!room.state().is_terminal(), "the room has ended");
            // What an earlier prompt left behind the last row is for nobody else.
            store.fill(&job.pages[job.pages.len() - 1..], 0.0);
            store.fill_ballast(&job.pages, room.id().0);
            let logits = model::prefill(
                &model,
                &job.tokens,
                &job.schedule,
                &mut seq,
                &*store,
                &mut on_layer,
            )?;
            model::argmax(&logits)
        };
        self.node.compute.run(compute).await?
    }

    /// Writes what has been computed and the decode side does not have, layer by layer, and with the
    /// last chunk the ballast of all. Returns how many pages at the beginning it has.
    async fn write(&self, job: &Job, mut rows: mpsc::UnboundedReceiver<Rows>) -> Result<usize> {
        let room = &job.live.room;
        let granted = room.granted().await?;
        let cached_pages = self.cached_pages(&granted, job.pages.len())?;
        let ballast = self.node.store.ballast();
        let write = |pages: Range<usize>, layers: Range<usize>| {
            let from = pages.start.max(cached_pages).min(pages.end);
            let to = |page: usize| page.saturating_sub(cached_pages) as u32;
            // Where all of it is cached this is a chunk of no pages.
            let positions = to(from)..to(pages.end);
            let chunk = Chunk::new(PoolId::FIRST, &job.pages[from..pages.end], positions);
            room.write(chunk.layers(layers.start as u32..layers.end as u32))
        };
        while let Some(Rows { chunk, layer, pages }) = rows.recv().await {
            write(pages, layer..layer + 1).await?;
            if layer + 1 < ballast.start {
                continue;
            }
            let (room_id, of) = (room.id().0, job.schedule.len());
            if chunk == 0 && job.live.hold {
                self.node.output.say(&Event::Held { room: room_id });
                job.live.resumed().await;
            }
            if chunk + 1 == of && !ballast.is_empty() {
                write(0..job.pages.len(), ballast.clone()).await?;
            }
            self.node.output.say(&Event::Chunk { room: room_id, chunk: chunk + 1, of });
        }
        if job.live.hold {
            job.live.resumed().await;
        }
        Ok(cached_pages)
    }

    /// Pages at the beginning of the prompt that the decode side has.
    fn cached_pages(&self, granted: &Granted, pages: usize) -> Result<usize> {
        let cached = GrantNote::from_bytes(&granted.note)?.cached_tokens as usize;
        let positions = granted.pools.first().map_or(0, |pool| pool.positions as usize);
        ensure!(
            cached.is_multiple_of(self.node.page_tokens)
                && cached / self.node.page_tokens + positions == pages,
            "{positions} pages granted after {cached} cached tokens, the prompt has {pages} pages of \
             {} tokens: give both sides the same prompt and flags",
            self.node.page_tokens
        );
        Ok(cached / self.node.page_tokens)
    }

    /// All pages are handed in; the end carries the first token.
    async fn finish(&self, job: &Job, first: u32, cached_pages: usize) -> Result<()> {
        let aux = AuxRow {
            room: job.live.room.id().0,
            prompt_tokens: u32::try_from(job.tokens.len())?,
            first,
            checksum: self.node.store.checksum(&job.pages[cached_pages..]),
        };
        let aux = aux.to_bytes();
        loop {
            match job.live.room.finish(aux.clone()) {
                Err(WriteError::Full) => tokio::time::sleep(RETRY).await,
                Err(WriteError::Ended(_)) => return Ok(()),
                done => return Ok(done?),
            }
        }
    }
}
