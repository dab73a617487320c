//! Which rooms are run, with which prompts.

use anyhow::{Context, Result, ensure};

use super::PairArgs;
use crate::model::{Model, ModelConfig};
use crate::node::tokens;
use crate::protocol::Prompt;

/// What the prompts are about: long enough for several chunks of bytes, and answerable.
const TOPICS: [(&str, &str); 8] = [
    (
        "A lighthouse stands on a rock two miles from the coast. Its keeper climbs the stairs every \
         evening to light the lamp, and writes the names of the passing ships into a book.",
        "What does the keeper write into the book?",
    ),
    (
        "Water boils at one hundred degrees Celsius at sea level. On a high mountain the air is thinner, \
         the pressure is lower, and water boils at a lower temperature, so that beans take longer to cook.",
        "Why do beans take longer to cook on a high mountain?",
    ),
    (
        "The library opens at nine in the morning and closes at six in the evening, except on Sundays, \
         when it is closed all day. Books may be kept for three weeks, and longer if nobody else asks.",
        "For how long may a book be kept?",
    ),
    (
        "A ferry carries cars and people across the river. It holds twenty cars. When the water is high \
         it does not run, and everybody takes the bridge in the next town, which is ten miles away.",
        "What do people do when the water is high?",
    ),
    (
        "Bees visit flowers to collect nectar and pollen. They carry it to the hive, where nectar becomes \
         honey. On their way they carry pollen from flower to flower, and so plants bear fruit.",
        "How do bees help plants bear fruit?",
    ),
    (
        "The capital of France is Paris. It lies on the river Seine, and it has been the home of kings, \
         painters and writers. Its tower of iron was built for the world's fair of 1889.",
        "What is the capital of France?",
    ),
    (
        "A baker gets up at three in the morning. He mixes flour, water, salt and yeast, lets the dough \
         rest for two hours, and bakes it in a hot oven, so that the bread is ready when the town wakes.",
        "Name the four things the baker mixes.",
    ),
    (
        "The moon turns around the earth in about twenty-seven days, and always shows it the same side. \
         Its gravity pulls at the sea, which rises and falls twice a day: the tides.",
        "What causes the tides?",
    ),
];
/// Asked of a prompt that was asked before: only the pages after it are missing.
const MORE: &str = "Answer in one short sentence, then ask a question about the same thing.";

/// Why a room is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Plain,
    /// Its prompt is whole chunks: every page is sent before the end, which carries aux alone.
    WholePages,
    /// Its id had a room before, which has ended.
    Reused,
    /// The decode side has the beginning of its prompt.
    CachedPrefix,
    /// The decode side has all of its prompt: nothing travels but aux.
    AuxAlone,
    /// It will not live to its end.
    Doomed,
    /// Its decode process is stopped for a while, and nobody gives it up.
    Exposed,
}

impl What {
    /// Whether it may fail.
    pub(super) const fn may_fail(self) -> bool {
        matches!(self, Self::Doomed | Self::Exposed)
    }

    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Plain | Self::Doomed => "",
            Self::Exposed => "outlived the stop",
            Self::WholePages => "empty last chunk",
            Self::Reused => "id reused",
            Self::CachedPrefix => "prefix cached",
            Self::AuxAlone => "all cached, aux alone",
        }
    }
}

/// A room to be run.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) room: u64,
    pub(super) prompt: String,
    pub(super) tokens: Vec<u32>,
    pub(super) what: What,
}

/// Makes plans.
pub(super) struct Planner<'a> {
    args: &'a PairArgs,
    model: &'a Model,
    prompts: Option<Vec<String>>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(args: &'a PairArgs, model: &'a Model) -> Result<Self> {
        let read = |path: &std::path::PathBuf| -> Result<Vec<String>> {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("the prompts {}", path.display()))?;
            let prompts: Vec<_> = text
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
                .map(str::to_owned)
                .collect();
            ensure!(!prompts.is_empty(), "{} has no prompts: write one a line", path.display());
            Ok(prompts)
        };
        let prompts = args.prompts.as_ref().map(read).transpose()?;
        let planner = Self { args, model, prompts };
        // What cannot be computed is known before anything is started.
        for step in planner.try_steps()? {
            ensure!(!step.is_empty(), "no rooms");
        }
        Ok(planner)
    }

    pub(super) fn config(&self) -> &ModelConfig {
        self.model.config()
    }

    /// The rooms, in steps: those of one step run at once.
    pub(super) fn steps(&self) -> Vec<Vec<Plan>> {
        self.try_steps().unwrap_or_default()
    }

    fn try_steps(&self) -> Result<Vec<Vec<Plan>>> {
        if let Some(prompts) = &self.prompts {
            let rooms = prompts.iter().zip(1..);
            let step = rooms.map(|(prompt, room)| self.plan(room, prompt.clone(), What::Plain));
            return Ok(vec![step.collect::<Result<_>>()?]);
        }
        let whole =
            if self.args.rooms < 6 { None } else { self.whole_chunks(self.args.rooms - 3)? };
        let Some(whole) = whole else {
            return Ok(vec![self.plain(1..=self.args.rooms, What::Plain)?]);
        };
        let last = self.args.rooms - 3;
        // The last rooms' prompts are asked again: earlier ones the decode side may have forgotten.
        let mut first = self.plain(1..=last - 1, What::Plain)?;
        first.push(whole.clone());
        let longer = format!("{} {MORE}", topic(last - 1));
        let second = vec![
            self.plan(1, topic(last + 1), What::Reused)?,
            self.plan(last + 1, longer, What::CachedPrefix)?,
            Plan { room: last + 2, what: What::AuxAlone, ..whole },
        ];
        Ok(vec![first, second])
    }

    /// Rooms of these ids with prompts of their own.
    pub(super) fn plain(
        &self,
        rooms: std::ops::RangeInclusive<u64>,
        what: What,
    ) -> Result<Vec<Plan>> {
        rooms.map(|room| self.plan(room, topic(room), what)).collect()
    }

    fn plan(&self, room: u64, prompt: String, what: What) -> Result<Plan> {
        let tokens = tokens(self.model, &Prompt::Text(prompt.clone()), self.args.max_new as usize)
            .with_context(|| format!("the prompt of room {room}"))?;
        Ok(Plan { room, prompt, tokens, what })
    }

    /// A prompt of whole chunks: digits are appended, each a token, until it is. `None` where they do
    /// not add up.
    fn whole_chunks(&self, room: u64) -> Result<Option<Plan>> {
        let chunk = self.args.model.chunk_tokens as usize;
        let mut prompt = format!("{} Request ", topic(room));
        for digit in (0..10).cycle().take(2 * chunk) {
            prompt.push_str(&digit.to_string());
            let plan = self.plan(room, prompt.clone(), What::WholePages)?;
            if plan.tokens.len().is_multiple_of(chunk) {
                return Ok(Some(plan));
            }
        }
        Ok(None)
    }
}

/// The prompt of a room. From the ninth on they begin with a number: no two begin alike.
fn topic(room: u64) -> String {
    let (told, asked) = TOPICS[((room - 1) % TOPICS.len() as u64) as usize];
    match room.checked_sub(TOPICS.len() as u64 + 1) {
        None => format!("{told} {asked}"),
        Some(_) => format!("Note {room}. {told} {asked}"),
    }
}
