//! Prints the duration of a run of a model, by number of lanes and tokens.
//!
//! `cargo run --release --example step_times -- MODEL_DIR [THREADS] [SPIN 0|1] [CONTEXT]`

#[cfg(not(feature = "onnx"))]
fn main() {
    eprintln!("built without the feature onnx");
}

#[cfg(feature = "onnx")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    use foretell_onnx::forward::{Feed, Forward, Lane, Rows};
    use foretell_onnx::open::DeviceChoice;
    use foretell_onnx::open::Options;
    use foretell_onnx::runtime::model::Model;
    use std::time::Instant;

    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let folder = arguments.first().ok_or("usage: step_times MODEL_DIR [THREADS] [SPIN] [CONTEXT]")?;
    let number = |index: usize, default: usize| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let (threads, spinning, context) = (number(1, 0)?, number(2, 0)? == 1, number(3, 300)?);
    let options = Options { device: DeviceChoice::Cpu, lanes: 4, threads, spinning, ..Options::default() };
    let mut model = Model::open(folder.as_ref(), &options)?;
    let lanes: Vec<Lane> = (0..4).filter_map(|_| model.reserve()).collect();
    let prompt: Vec<u32> =
        (0..context as u32).map(|token| token * 7 % model.config().vocabulary as u32).collect();
    for &lane in &lanes {
        let started = Instant::now();
        model.run(&[Feed { lane, tokens: &prompt, parents: None, rows: Rows::Last, draft: None }])?;
        println!("prefill {context}: {:.2} ms", started.elapsed().as_secs_f64() * 1e3);
    }
    println!("lanes x tokens: median, minimum [ms]");
    for (count, tokens) in [(1, 1), (1, 2), (1, 3), (1, 5), (1, 9), (1, 17), (1, 33), (2, 1), (4, 1), (4, 5)]
    {
        let text: Vec<u32> = prompt.iter().copied().take(tokens).collect();
        let mut times = Vec::new();
        for _ in 0..80 {
            let feeds: Vec<Feed<'_>> = lanes
                .iter()
                .take(count)
                .map(|&lane| Feed { lane, tokens: &text, parents: None, rows: Rows::From(0), draft: None })
                .collect();
            let started = Instant::now();
            model.run(&feeds)?;
            times.push(started.elapsed().as_secs_f64() * 1e3);
            for &lane in lanes.iter().take(count) {
                model.rewind(lane, context);
            }
        }
        times.sort_by(f64::total_cmp);
        let (least, median) = (times.first(), times.get(times.len() / 2));
        println!("{count} x {tokens}: {:.3}, {:.3}", median.unwrap_or(&0.0), least.unwrap_or(&0.0));
    }
    Ok(())
}
