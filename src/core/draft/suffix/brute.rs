//! The definitions by brute force, for the tests: every position with its context and its
//! continuation.

use proptest::prelude::*;
use proptest::sample::select;

use super::order::{DEPTH, SEPARATOR};
use super::{AHEAD, Draft, MANY, Proposal, Rules, Shape, TokenId};

/// A position with its context (the last token first) and its continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Occurrence {
    pub position: usize,
    pub before: Vec<TokenId>,
    pub after: Vec<TokenId>,
}

/// Up to `len` tokens of a context, the last one first.
pub fn backwards(context: &[TokenId]) -> Vec<TokenId> {
    context.iter().rev().take_while(|token| **token != SEPARATOR).take(DEPTH).copied().collect()
}

fn agreement(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Every position that has a context and a next token, in order.
pub fn occurrences(text: &[TokenId]) -> Vec<Occurrence> {
    let after = |position: usize| -> Vec<TokenId> {
        text[position..].iter().take_while(|token| **token != SEPARATOR).take(AHEAD).copied().collect()
    };
    let mut all: Vec<Occurrence> = (0..text.len())
        .map(|position| Occurrence { position, before: backwards(&text[..position]), after: after(position) })
        .filter(|found| !found.before.is_empty() && !found.after.is_empty())
        .collect();
    all.sort_by(|a, b| (&a.before, a.position).cmp(&(&b.before, b.position)));
    all
}

/// The same in the order of an unsorted tail.
pub fn by_agreement(mut all: Vec<Occurrence>, context: &[TokenId]) -> Vec<Occurrence> {
    let context = backwards(context);
    all.sort_by_key(|found| (DEPTH - agreement(&found.before, &context), found.position));
    all
}

/// Indices of the positions that agree with `context` for `len` tokens.
pub fn agreeing(all: &[Occurrence], context: &[TokenId], len: usize) -> Vec<usize> {
    let context = backwards(context);
    (0..all.len()).filter(|&index| agreement(&all[index].before, &context) >= len).collect()
}

pub fn joined(documents: &[(u64, &[TokenId])]) -> Vec<TokenId> {
    let mut text: Vec<TokenId> = Vec::new();
    for (_, tokens) in documents {
        if text.last().is_some_and(|last| *last != SEPARATOR) {
            text.push(SEPARATOR);
        }
        text.extend(*tokens);
    }
    text
}

/// A node of a trie that is built in full.
#[derive(Default)]
struct Trie {
    token: TokenId,
    count: u32,
    newest: usize,
    children: Vec<Trie>,
}

impl Trie {
    /// Adds a text that is more recent than all before it.
    fn add(&mut self, text: &[TokenId], age: usize) {
        self.count += 1;
        self.newest = age;
        if let Some((&token, rest)) = text.split_first() {
            let known = self.children.iter().position(|child| child.token == token);
            let index = known.unwrap_or_else(|| {
                self.children.push(Trie { token, ..Trie::default() });
                self.children.len() - 1
            });
            self.children[index].add(rest, age);
        }
    }

    fn proposal(&self, parent: Option<usize>, chance: f64, above: &Self) -> Proposal {
        let share = f64::from(self.count) / f64::from(above.count);
        Proposal { token: self.token, parent, chance: chance * share, share, count: self.count }
    }
}

fn path(trie: &Trie, budget: usize, least: f64) -> Vec<Proposal> {
    let (mut nodes, mut at, mut chance) = (Vec::<Proposal>::new(), trie, 1.0);
    while let Some(child) = at.children.iter().max_by_key(|child| (child.count, child.newest)) {
        let node = child.proposal(nodes.len().checked_sub(1), chance, at);
        if nodes.len() == budget || node.chance < least {
            break;
        }
        nodes.push(node);
        (at, chance) = (child, node.chance);
    }
    nodes
}

fn tree(trie: &Trie, budget: usize, least: f64) -> Vec<Proposal> {
    let mut nodes = Vec::new();
    let mut waiting: Vec<(Proposal, usize, &Trie)> = Vec::new();
    let mut parent: (Option<usize>, f64, usize, &Trie) = (None, 1.0, 0, trie);
    while nodes.len() < budget {
        let (index, chance, depth, above) = parent;
        let below =
            above.children.iter().map(|child| (child.proposal(index, chance, above), depth + 1, child));
        waiting.extend(below.filter(|(node, ..)| node.chance >= least));
        waiting.sort_by(|a, b| {
            a.0.chance.total_cmp(&b.0.chance).then(b.1.cmp(&a.1)).then(a.2.newest.cmp(&b.2.newest))
        });
        let Some((node, depth, at)) = waiting.pop() else { break };
        nodes.push(node);
        parent = (Some(nodes.len() - 1), node.chance, depth, at);
    }
    nodes
}

/// The draft of continuations, the oldest first.
pub fn draft(after: &[&[TokenId]], shape: Shape, budget: usize, least: f64) -> Draft {
    let mut trie = Trie::default();
    after.iter().enumerate().for_each(|(age, text)| trie.add(text, age));
    let nodes = match shape {
        Shape::Path => path(&trie, budget, least),
        Shape::Tree => tree(&trie, budget, least),
    };
    let score = nodes.iter().map(|node| node.chance).sum();
    Draft { nodes, score, sampled: after.len(), ..Draft::default() }
}

/// The draft of one match length, from sources in order.
pub fn trial(
    sources: &[Vec<Occurrence>],
    context: &[TokenId],
    len: usize,
    rules: &Rules,
    shape: Shape,
) -> Draft {
    let mut met: Vec<(usize, &Occurrence)> = Vec::new();
    for (age, source) in sources.iter().enumerate() {
        met.extend(agreeing(source, context, len).into_iter().map(|index| (age, &source[index])));
    }
    let many = met.len().min(MANY);
    let mut sample: Vec<_> = (1..=many).map(|nth| met[nth * met.len() / many - 1]).collect();
    sample.sort_by_key(|(age, found)| (*age, found.position));
    let after: Vec<&[TokenId]> = sample.iter().map(|(_, found)| &*found.after).collect();
    let budget = rules.budget(len);
    Draft { match_len: len, positions: met.len(), ..draft(&after, shape, budget, rules.min_token_prob) }
}

pub fn lengths(sources: &[Vec<Occurrence>], context: &[TokenId]) -> Vec<usize> {
    let context = backwards(context);
    let all = sources.iter().flatten().map(|found| agreement(&found.before, &context));
    let agreements: Vec<usize> = all.collect();
    let width = |len: usize| agreements.iter().filter(|&&agreement| agreement >= len).count();
    let mut tried: Vec<usize> = Vec::new();
    for len in (1..=DEPTH).rev() {
        let needed = tried.last().map_or(1, |&last| 2 * width(last));
        if tried.len() < 2 && width(len) >= needed {
            tried.push(len);
        }
    }
    tried
}

/// The best draft of all lengths tried; the longer match wins ties.
pub fn best(sources: &[Vec<Occurrence>], context: &[TokenId], rules: &Rules, shape: Shape) -> Option<Draft> {
    let drafts = lengths(sources, context).into_iter().map(|len| trial(sources, context, len, rules, shape));
    drafts.fold(None, |best: Option<Draft>, draft| {
        let better = draft.score > best.as_ref().map_or(0.0, |best| best.score);
        if better { Some(draft) } else { best }
    })
}

/// Texts of few different tokens, of tokens at the limits of the ids, and texts that repeat
/// themselves.
pub fn texts(max: usize) -> impl Strategy<Value = Vec<TokenId>> {
    let ids = vec![0, 1, (1 << 21) - 3, (1 << 21) - 2, 1 << 21, SEPARATOR - 1, SEPARATOR];
    let repeated = (prop::collection::vec(0_u32..3, 1..12), 0..max, prop::collection::vec(0_u32..3, 0..4));
    prop_oneof![
        prop::collection::vec(0_u32..2, 0..max),
        prop::collection::vec(0_u32..4, 0..max),
        prop::collection::vec(select(ids), 0..max),
        repeated.prop_map(|(pattern, len, end)| {
            pattern.iter().copied().cycle().take(len).chain(end).collect()
        }),
    ]
}

pub fn documents(count: usize, max: usize) -> impl Strategy<Value = Vec<(u64, Vec<TokenId>)>> {
    prop::collection::vec((0_u64..4, texts(max)), 0..count)
}

/// The argument of [`super::Segment::build`].
pub fn borrowed(documents: &[(u64, Vec<TokenId>)]) -> Vec<(u64, &[TokenId])> {
    documents.iter().map(|(id, tokens)| (*id, &**tokens)).collect()
}
