//! The decode side: grants pages of its own, waits for the room, and generates on from them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use kvferry::{
    Engine, GrantError, GrantSpec, Incarnation, PeerHealth, PoolId, Received, RecvRoom, RoomHandle,
};
use tokio::task::JoinSet;

use crate::carried::{AuxRow, GrantNote};
use crate::flags::{EngineArgs, ModelArgs};
use crate::model::{self, KvSequence};
use crate::node::{Follow, Node, serve};
use crate::pages::{FreeList, Page};
use crate::prefix::PrefixCache;
use crate::protocol::{Command, Event, Prompt, RoomLine, Scan};

/// The part of the pool that kept prefixes may fill, as a divisor: rooms need the rest.
const KEPT_DIVISOR: u32 = 4;
/// How long to wait before a grant is tried again that found the engine's queue full.
const RETRY: Duration = Duration::from_millis(1);

/// Flags of `decode`.
#[derive(Clone, Debug, Parser)]
#[command(
    version,
    about = "Generates text from KV pages that a prefill process sends. Driven by lines of JSON on stdin."
)]
pub struct DecodeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Most tokens to generate for a prompt, where the command does not say.
    #[arg(long, default_value_t = 24)]
    max_new: u32,
}

/// Runs `decode` until its stdin ends.
///
/// # Errors
/// What keeps it from starting.
pub fn run(args: &DecodeArgs) -> Result<()> {
    let node = Node::start(&args.model, &args.engine, "decode")?;
    let kept_max = args.model.pages / KEPT_DIVISOR;
    let prefixes = PrefixCache::new(node.chunk_tokens, node.page_tokens, kept_max as usize);
    serve(Decode {
        node,
        free: FreeList::shuffled(args.model.pages, args.model.seed),
        room_pages_max: (args.model.pages - kept_max) as usize,
        prefixes: Mutex::new(prefixes),
        max_new: args.max_new,
        exact_rooms: AtomicUsize::new(0),
        rooms: Mutex::default(),
    })
}

#[derive(Debug)]
struct Decode {
    node: Node,
    free: FreeList,
    /// Most pages of one room: what is free when nothing but kept prefixes is there.
    room_pages_max: usize,
    prefixes: Mutex<PrefixCache>,
    max_new: u32,
    /// Rooms done with the very bytes that were sent.
    exact_rooms: AtomicUsize,
    /// Live rooms by id: to be aborted, once granted.
    rooms: Mutex<HashMap<u64, Option<Arc<RecvRoom>>>>,
}

/// A prompt, and the pages its K/V will be in.
#[derive(Debug)]
struct Sequence {
    tokens: Vec<u32>,
    max_new: usize,
    pages: Vec<Arc<Page>>,
    /// Pages at the beginning that were here before.
    cached_pages: usize,
}

impl Follow for Decode {
    fn node(&self) -> &Node {
        &self.node
    }

    fn into_engine(self) -> Engine {
        self.node.engine
    }

    fn follow(self: &Arc<Self>, command: Command, rooms: &mut JoinSet<()>) -> Result<()> {
        match command {
            Command::Decode { room, prompt, max_new } => {
                let max_new = max_new.unwrap_or(self.max_new) as usize;
                let tokens = self.tokens(&prompt, max_new)?;
                let peer = self.prefill_peer()?;
                match self.live().entry(room) {
                    std::collections::hash_map::Entry::Occupied(_) => {
                        bail!("room {room} is live already; wait for its end, or abort it")
                    }
                    std::collections::hash_map::Entry::Vacant(entry) => entry.insert(None),
                };
                let this = Arc::clone(self);
                rooms.spawn(async move {
                    if let Err(error) = this.serve_room(room, peer, tokens, max_new).await {
                        this.node.output.refuse(Some(room), &error);
                    }
                });
            }
            Command::Abort { room, reason } => match self.live().get(&room) {
                Some(Some(room)) => room.abort(&reason),
                Some(None) => bail!("room {room} has no grant yet: try again later"),
                None => bail!("there is no live room {room}"),
            },
            Command::Scan => {
                let this = Arc::clone(self);
                rooms.spawn(async move {
                    if let Err(error) = this.scan().await {
                        this.node.output.refuse(None, &error);
                    }
                });
            }
            _ => bail!("not a command for decode"),
        }
        Ok(())
    }
}

impl Decode {
    fn live(&self) -> MutexGuard<'_, HashMap<u64, Option<Arc<RecvRoom>>>> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn prefixes(&self) -> MutexGuard<'_, PrefixCache> {
        self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tokens(&self, prompt: &Prompt, max_new: usize) -> Result<Vec<u32>> {
        let tokens = self.node.tokens(prompt, max_new)?;
        let needed = self.node.pages_for(tokens.len() + max_new);
        ensure!(
            needed <= self.room_pages_max,
            "{needed} pages needed, a room may have {}: raise --pages",
            self.room_pages_max
        );
        Ok(tokens)
    }

    /// The prefill engine to grant to: the one peer there is.
    fn prefill_peer(&self) -> Result<Incarnation> {
        let peers = self.node.engine.peers();
        let with = |health: &PeerHealth| peers.iter().find(|peer| peer.health == *health);
        let peer = with(&PeerHealth::Up).or_else(|| with(&PeerHealth::Reconnecting));
        Ok(peer.context("no prefill is connected: start one, and --connect to it")?.incarnation)
    }

    /// A room from its grant to the end of its text.
    async fn serve_room(
        &self,
        id: u64,
        peer: Incarnation,
        tokens: Vec<u32>,
        max_new: usize,
    ) -> Result<()> {
        let granted = async {
            let sequence = self.sequence(tokens, max_new).await?;
            let room = self.grant(id, peer, &sequence).await?;
            Ok((Arc::new(room), sequence))
        };
        let granted: Result<_> = granted.await;
        let (room, sequence) = granted.inspect_err(|_| drop(self.live().remove(&id)))?;
        self.live().insert(id, Some(Arc::clone(&room)));
        let done = room.done().await;
        // An id is free as soon as its room has ended.
        self.live().remove(&id);
        let (output, report) = (&self.node.output, room.report());
        output.say(&Event::Room(RoomLine::new(&report, sequence.tokens.len())));
        room.released().await;
        let carried = self.carried(&sequence);
        if done.is_err() {
            sequence.pages[carried.clone()].iter().for_each(|page| page.mark_failed());
        }
        let epoch = report.epoch.map(|epoch| epoch.0);
        let released = Event::Released { room: id, epoch, after_abort_us: None, overwritten: 0 };
        output.say(&released);
        // The report of a failed room has said all there is to say.
        let Ok(received) = done else { return Ok(()) };
        self.generate(id, &received, sequence, carried).await
    }

    /// The pages of the prompt that are not here yet, by their place in the sequence.
    const fn carried(&self, sequence: &Sequence) -> Range<usize> {
        sequence.cached_pages..self.node.pages_for(sequence.tokens.len())
    }

    /// Pages for a prompt and for what will be generated: those that are cached of it, and fresh ones.
    async fn sequence(&self, tokens: Vec<u32>, max_new: usize) -> Result<Sequence> {
        // All it could need at once: rooms that hold some pages and wait for more could wait for each
        // other.
        let mut fresh = self.free.take(self.node.pages_for(tokens.len() + max_new)).await?;
        let mut pages = self.prefixes().find(&tokens);
        let cached_pages = pages.len();
        pages.extend(fresh.drain(cached_pages..).map(Arc::new));
        Ok(Sequence { tokens, max_new, pages, cached_pages })
    }

    /// Grants the pages of the prompt that are not here yet.
    async fn grant(&self, id: u64, peer: Incarnation, sequence: &Sequence) -> Result<RecvRoom> {
        let carried = &sequence.pages[self.carried(sequence)];
        let pages: Vec<u32> = carried.iter().map(|page| page.number()).collect();
        let again = carried.iter().filter(|page| page.is_again()).count();
        let cached_tokens = u32::try_from(sequence.cached_pages * self.node.page_tokens)?;
        let spec = GrantSpec::new(id.into())
            .pages(PoolId::FIRST, pages.as_slice())
            .note(GrantNote { cached_tokens }.to_bytes());
        let room = loop {
            match self.node.engine.grant(peer, spec.clone()) {
                Err(GrantError::Full) => tokio::time::sleep(RETRY).await,
                granted => break granted?,
            }
        };
        self.node.output.say(&Event::Granted { room: id, pages, cached_tokens, again });
        Ok(room)
    }

    /// Generates on from the carried pages, and keeps the prompt's for later ones.
    async fn generate(
        &self,
        id: u64,
        received: &Received,
        sequence: Sequence,
        carried: Range<usize>,
    ) -> Result<()> {
        let aux = AuxRow::from_bytes(&received.aux)?;
        let prompt_tokens = sequence.tokens.len();
        ensure!(
            aux.room == id && aux.prompt_tokens as usize == prompt_tokens,
            "the aux row is of room {} with {} tokens, this is room {id} with {prompt_tokens}",
            aux.room,
            aux.prompt_tokens
        );
        let (model, store) = (Arc::clone(&self.node.model), Arc::clone(&self.node.store));
        let carried = sequence.pages[carried].iter();
        let carried: Vec<u32> = carried.map(|page| page.number()).collect();
        ensure!(
            store.checksum(&carried) == aux.checksum,
            "the pages of room {id} are not what was sent: report it with both sides' logs"
        );
        self.exact_rooms.fetch_add(1, Ordering::Relaxed);
        self.prefixes().keep(&sequence.tokens, &sequence.pages);
        let generate = move || -> Result<_> {
            let mut seq = KvSequence::new(sequence.pages.iter().map(|page| page.number()));
            seq.len = prompt_tokens;
            let mut tokens = Vec::new();
            let mut push = |token| {
                tokens.push(token);
                Ok(())
            };
            let max_new = sequence.max_new;
            model::decode(&model, aux.first, &mut seq, &*store, max_new, &mut push)?;
            let text = model.tokenizer().decode(&tokens)?;
            Ok((tokens, text))
        };
        let (tokens, text) = self.node.compute.run(generate).await??;
        self.node.output.say(&Event::Text { room: id, tokens, text });
        Ok(())
    }

    /// Looks through every page that a room ever had.
    async fn scan(&self) -> Result<()> {
        let (store, (pages, again)) = (Arc::clone(&self.node.store), self.free.used());
        let count = pages.len();
        let poisoned = self.node.compute.run(move || store.poisoned(&pages)).await?;
        let exact_rooms = self.exact_rooms.load(Ordering::Relaxed);
        let scan = Scan { exact_rooms, pages: count, again, poisoned };
        self.node.output.say(&Event::Scanned(scan));
        Ok(())
    }
}
