//! Order in which the direct server and Foretell are measured.
//!
//! The speed of a machine drifts: caches warm up, clocks throttle, other programs come and go. Two
//! long runs one after the other would mostly measure that drift; short alternating blocks cancel
//! it out. The side that goes first changes with each alternation and with each pass over the
//! workload, so that no prompt always finds the server's prefix cache warmed by the same side.

/// One of the two ways to call the same server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Without Foretell.
    Direct,
    Through,
}

impl Side {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Through => "through",
        }
    }

    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::Direct => Self::Through,
            Self::Through => Self::Direct,
        }
    }
}

/// One block of prompts, sent to one side and then to the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alternation {
    pub first: Side,
    /// Indices into the workload; both sides get the same prompts.
    pub prompts: Vec<usize>,
}

/// Numbers from which the alternations are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Number of prompts in the workload.
    pub prompts: usize,
    /// Number of clients that send requests at the same time.
    pub concurrency: usize,
    /// Number of measured alternations, without the warm-up.
    pub alternations: usize,
}

impl Schedule {
    /// Prompts of one block: 5 per client, so that every client is busy for most of the block.
    pub const fn block(&self) -> usize {
        5 * if self.concurrency == 0 { 1 } else { self.concurrency }
    }

    /// Prompts sent to each side before the measurement: the last ones of the workload, so that the
    /// first blocks do not find their prompts in a cache.
    pub fn warm_up(&self) -> Vec<usize> {
        let wanted = self.concurrency.max(10);
        (0..wanted).filter_map(|back| self.prompts.checked_sub(1 + back % self.prompts.max(1))).collect()
    }

    /// The measured alternations, in order.
    pub fn alternations(&self) -> impl Iterator<Item = Alternation> + '_ {
        let blocks_per_pass = self.prompts.div_ceil(self.block()).max(1);
        (0..self.alternations).map(move |turn| {
            let flipped = (turn + turn / blocks_per_pass) % 2 == 1;
            let prompts = (turn * self.block()..(turn + 1) * self.block())
                .filter_map(|position| position.checked_rem(self.prompts))
                .collect();
            Alternation { first: if flipped { Side::Through } else { Side::Direct }, prompts }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCHEDULE: Schedule = Schedule { prompts: 50, concurrency: 1, alternations: 20 };

    #[test]
    fn every_prompt_is_sent_equally_often() {
        let mut asked = vec![0; 50];
        for alternation in SCHEDULE.alternations() {
            assert_eq!(alternation.prompts.len(), 5);
            for prompt in alternation.prompts {
                asked[prompt] += 1;
            }
        }
        assert!(asked.iter().all(|&times| times == 2), "{asked:?}");
    }

    #[test]
    fn the_first_side_alternates_for_every_prompt() {
        let turns: Vec<_> = SCHEDULE.alternations().collect();
        for (first_pass, second_pass) in turns[..10].iter().zip(&turns[10..]) {
            assert_eq!(first_pass.prompts, second_pass.prompts);
            assert_ne!(first_pass.first, second_pass.first);
        }
        assert!(turns[..10].windows(2).all(|pair| pair[0].first != pair[1].first));
    }

    #[test]
    fn more_clients_make_larger_blocks_and_warm_ups() {
        let schedule = Schedule { prompts: 7, concurrency: 32, alternations: 3 };
        assert_eq!(schedule.alternations().map(|turn| turn.prompts.len()).collect::<Vec<_>>(), [160; 3]);
        assert_eq!(schedule.warm_up().len(), 32);
        assert_eq!(SCHEDULE.warm_up(), [49, 48, 47, 46, 45, 44, 43, 42, 41, 40]);
    }

    #[test]
    fn an_empty_workload_sends_nothing() {
        let schedule = Schedule { prompts: 0, ..SCHEDULE };
        assert!(schedule.warm_up().is_empty());
        assert!(schedule.alternations().all(|turn| turn.prompts.is_empty()));
    }
}
