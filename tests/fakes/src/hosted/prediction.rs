//! Result of a prediction: its accepted and its rejected tokens.

/// Accepted tokens of the prediction, and rejected ones.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Predicted {
    pub accepted: usize,
    pub rejected: usize,
}

/// Number of predicted tokens that are tried at a time.
const WINDOW: usize = 8;

impl Predicted {
    /// Counts accepted and rejected tokens: windows are tried from the position at which the text
    /// was last found [unverified: no provider documents how it counts].
    pub fn of(prediction: &[u32], output: &[u32]) -> Self {
        let (mut at, mut position, mut all) = (0, Some(0), Self::default());
        while at < output.len() {
            let Some(from) = position.filter(|&from| from < prediction.len()) else {
                position = refound(prediction, &output[..=at]);
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
            position = if goes_on { Some(from + run + 1) } else { refound(prediction, told) };
        }
        all
    }
}

/// The position in the prediction after the last four tokens of the text.
fn refound(prediction: &[u32], told: &[u32]) -> Option<usize> {
    let tail = told.get(told.len().checked_sub(4)?..)?;
    let at = prediction.windows(4).position(|window| window == tail)?;
    Some(at + 4)
}
