//! What a prediction brought: which of its tokens came, and which were tried for nothing.

/// Tokens of the prediction that came, and those that were tried and did not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Predicted {
    pub accepted: usize,
    pub rejected: usize,
}

/// So many predicted tokens are tried at a time.
const WINDOW: usize = 8;

impl Predicted {
    /// How far the prediction helped: windows are tried from the place where the text was last found
    /// [unverified: no provider tells how it counts].
    pub fn of(prediction: &[u32], output: &[u32]) -> Self {
        let (mut at, mut place, mut all) = (0, Some(0), Self::default());
        while at < output.len() {
            let Some(from) = place.filter(|&from| from < prediction.len()) else {
                place = refound(prediction, &output[..=at]);
                at += 1;
                continue;
            };
            let window = &prediction[from..(from + WINDOW).min(prediction.len())];
            let run = window.iter().zip(&output[at..]).take_while(|(guess, token)| guess == token).count();
            all.accepted += run;
            all.rejected += window.len() - run;
            at += run + 1;
            let told = &output[..at.min(output.len())];
            let goes_on = run == window.len() && prediction.get(from + run) == told.last();
            place = if goes_on { Some(from + run + 1) } else { refound(prediction, told) };
        }
        all
    }
}

/// Behind the place in the prediction where the last four tokens of the text are.
fn refound(prediction: &[u32], told: &[u32]) -> Option<usize> {
    let tail = told.get(told.len().checked_sub(4)?..)?;
    let at = prediction.windows(4).position(|window| window == tail)?;
    Some(at + 4)
}
