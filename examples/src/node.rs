//! What `prefill` and `decode` have in common: the engine's start and the command loop.

use std::io::{BufRead, Read};
use std::net::{SocketAddr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kvferry::{Engine, PeerInfo, RailInfo};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::compute::Compute;
use crate::flags::{EngineArgs, ModelArgs};
use crate::model::Model;
use crate::protocol::{Command, Event, LINE_BYTES_MAX, Output, PeerLine, Prompt, Ready};
use crate::store::PoolStore;

/// Commands that may wait to be followed; more hold the reader of stdin back.
const COMMANDS: usize = 64;
/// How long a process that was told to quit waits for its peers to hear of it.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(2);

/// A process of the pair: an engine with one KV pool, and the model over it.
#[derive(Debug)]
pub struct Node {
    /// The engine.
    pub engine: Engine,
    /// The model.
    pub model: Arc<Model>,
    /// The pool its K/V live in.
    pub store: Arc<PoolStore>,
    /// Where jobs of the model run.
    pub compute: Compute,
    /// Where events go.
    pub output: Arc<Output>,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Tokens of a chunk.
    pub chunk_tokens: usize,
}

impl Node {
    /// Loads the model, starts the engine, connects it, and says that it is ready.
    ///
    /// # Errors
    /// Whatever stands in the way, with what to do about it.
    pub fn start(model: &ModelArgs, args: &EngineArgs, default_name: &str) -> Result<Self> {
        let name = args.name.as_deref().unwrap_or(default_name);
        let metrics = args.metrics_addr.map(serve_metrics).transpose()?;
        let pages = (model.pages, model.page_tokens);
        let chunk_tokens = model.chunk_tokens as usize;
        let ballast_layers = model.ballast_layers.unwrap_or(0);
        let model = Arc::new(model.load()?);
        let store = PoolStore::allocate(model.config(), pages.0, pages.1, ballast_layers)?;
        let store = Arc::new(store);
        let mut builder = Engine::builder(args.config(name)?);
        builder.pool(store.pool().clone())?;
        let engine = builder.start()?;
        if let Some(addr) = args.connect {
            kvferry::block_on(engine.connect(addr))?;
        }
        let node = Self {
            engine,
            model,
            store,
            compute: Compute::start()?,
            output: Arc::new(Output::default()),
            page_tokens: pages.1 as usize,
            chunk_tokens,
        };
        node.output.say(&Event::Ready(Ready {
            name: name.to_owned(),
            pid: std::process::id(),
            incarnation: node.engine.incarnation().to_string(),
            listen: node.engine.listen_addr(),
            io: node.engine.io().io.to_string(),
            rails: node.engine.rdma().rails.iter().map(rail_line).collect(),
            metrics,
            can_zero_copy: node.engine.io().sendmsg_zc,
        }));
        Ok(node)
    }

    /// The tokens of a prompt.
    ///
    /// # Errors
    /// Text the vocabulary cannot spell, no tokens, or more than the context with `max_new` more.
    pub fn tokens(&self, prompt: &Prompt, max_new: usize) -> Result<Vec<u32>> {
        tokens(&self.model, prompt, max_new)
    }

    /// Pages that `tokens` tokens need.
    #[must_use]
    pub const fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_tokens)
    }

    /// Says who the peers are.
    pub fn say_peers(&self) {
        let line = |peer: PeerInfo| PeerLine {
            name: peer.name,
            incarnation: peer.incarnation.to_string(),
            addr: peer.addr,
            health: format!("{:?}", peer.health),
            fabric: peer.fabric.to_string(),
            why_not_rdma: peer.why_not_rdma.clone(),
            lanes: peer.lanes.len(),
            paths: peer.lanes.iter().map(|lane| lane.path.to_string()).collect(),
        };
        let peers = self.engine.peers().into_iter().map(line).collect();
        self.output.say(&Event::Peers { peers });
    }
}

/// The tokens of a prompt for a model.
///
/// # Errors
/// See [`Node::tokens`].
pub fn tokens(model: &Model, prompt: &Prompt, max_new: usize) -> Result<Vec<u32>> {
    let tokens = match prompt {
        Prompt::Text(text) => model.tokenizer().encode(&model.tokenizer().chat_prompt(text))?,
        Prompt::Tokens(tokens) => tokens.clone(),
    };
    let (config, total) = (model.config(), tokens.len() + max_new);
    ensure!(!tokens.is_empty(), "the prompt is empty");
    ensure!(
        total <= config.context,
        "{} tokens and {max_new} new ones exceed the context of {}: shorten the prompt",
        tokens.len(),
        config.context
    );
    if let Some(token) = tokens.iter().find(|&&token| token as usize >= config.vocab) {
        anyhow::bail!("token {token} is not in the vocabulary of {} tokens", config.vocab);
    }
    Ok(tokens)
}

/// Serves the metrics of this process; returns where.
fn serve_metrics(addr: SocketAddr) -> Result<SocketAddr> {
    // The exporter does not tell which port it got, so a free one is looked up first.
    let at = match addr.port() {
        0 => TcpListener::bind(addr).and_then(|free| free.local_addr()),
        _ => Ok(addr),
    };
    let at = at.with_context(|| format!("no free port for metrics on {addr}"))?;
    let exporter = PrometheusBuilder::new().with_http_listener(at);
    exporter.install().with_context(|| format!("cannot serve metrics on {at}"))?;
    Ok(at)
}

/// Runs a binary: logs go to stderr as `RUST_LOG` says (warnings without it), an error is one line
/// there and exit code 1.
pub fn to_exit_code(name: &str, run: impl FnOnce() -> Result<()>) -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Follows a command about a room, or says why not. What takes time is spawned.
pub trait Follow: Send + Sync + 'static {
    /// The process.
    fn node(&self) -> &Node;

    /// The engine, to be shut down when no room uses it any more.
    fn into_engine(self) -> Engine;

    /// Begins what a command asks for; its rest runs among `rooms`.
    ///
    /// # Errors
    /// What is wrong with the command; nothing has changed then.
    fn follow(self: &Arc<Self>, command: Command, rooms: &mut JoinSet<()>) -> Result<()>;
}

/// Follows the commands on stdin until it ends or says to quit, then lets live rooms end.
///
/// # Errors
/// The operating system's, when it has no thread to give.
pub fn serve<F: Follow>(follower: F) -> Result<()> {
    let follower = Arc::new(follower);
    let (commands, mut queue) = mpsc::channel(COMMANDS);
    let output = Arc::clone(&follower.node().output);
    std::thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || read_commands(std::io::stdin().lock(), &output, &commands))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    runtime.block_on(async {
        let mut rooms = JoinSet::new();
        loop {
            let command = tokio::select! {
                command = queue.recv() => command,
                Some(ended) = rooms.join_next() => {
                    ended.context("a room's task panicked")?;
                    continue;
                }
            };
            match command {
                None | Some(Command::Quit) => break,
                Some(Command::Peers) => follower.node().say_peers(),
                Some(command) => {
                    let room = room_of(&command);
                    if let Err(error) = follower.follow(command, &mut rooms) {
                        follower.node().output.refuse(room, &error);
                    }
                }
            }
        }
        while let Some(ended) = rooms.join_next().await {
            ended.context("a room's task panicked")?;
        }
        if let Some(follower) = Arc::into_inner(follower) {
            follower.into_engine().shutdown(SHUTDOWN_PATIENCE).await;
        }
        Ok(())
    })
}

const fn room_of(command: &Command) -> Option<u64> {
    match command {
        Command::Prefill { room, .. }
        | Command::Resume { room }
        | Command::Decode { room, .. }
        | Command::Abort { room, .. } => Some(*room),
        Command::Peers | Command::Scan | Command::Quit => None,
    }
}

/// A rail, and the GID it is best reached by.
fn rail_line(rail: &RailInfo) -> String {
    let gid = rail.gids.first().map(|(index, gid)| format!(" (GID {gid} at index {index})"));
    format!("{}{}", rail.rail, gid.unwrap_or_default())
}

/// Reads commands until the end; a line that is none is refused, and the next one read.
fn read_commands(mut from: impl BufRead, output: &Output, to: &mpsc::Sender<Command>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
            Ok(0) => return,
            Ok(_) if line.last() != Some(&b'\n') && line.len() as u64 == LINE_BYTES_MAX => {
                output.refuse(None, &anyhow::anyhow!("a line of over {LINE_BYTES_MAX} bytes"));
                if from.skip_until(b'\n').is_err() {
                    return;
                }
            }
            Ok(_) if line.trim_ascii().is_empty() => {}
            Ok(_) => match serde_json::from_slice(&line) {
                Ok(command) => {
                    if to.blocking_send(command).is_err() {
                        return;
                    }
                }
                Err(error) => {
                    let error = anyhow::Error::new(error).context("not a command");
                    output.refuse(None, &error);
                }
            },
            Err(error) => {
                output.refuse(None, &anyhow::Error::new(error).context("reading stdin"));
                return;
            }
        }
    }
}
