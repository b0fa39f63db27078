//! Gamma over temperature and load, in three panels: with plain decoding as gamma 0, of rounds
//! alone, and the share of plain tokens.

use std::fmt::Write;

use super::rule;
use crate::sim::sweep::{self, Cell};
use foretell::bench::html::{escape, section, table, tick};

/// Horizontal edges of the panels.
const PANELS: [(f64, f64); 3] = [(34.0, 286.0), (338.0, 590.0), (642.0, 894.0)];
/// Top and bottom edges of each.
const RANGE: (f64, f64) = (26.0, 256.0);

/// Adds the plot and its table; nothing without cells.
pub fn put(page: &mut String, cells: &[Cell]) {
    if cells.is_empty() {
        return;
    }
    let clients = sweep::values(cells, |cell| (cell.clients, cell.load));
    let key = clients.iter().enumerate().map(|(number, &(count, load))| {
        let plural = if count == 1 { "" } else { "s" };
        let name = escape(&format!("{count} client{plural} (load {load:.2})"));
        format!("<span class=\"key\" style=\"background:{}\"></span>{name}", ink(number, clients.len()))
    });
    let says = format!(
        "By the temperature of the requests, with a line for each number of clients: gamma where plain decoding is gamma 0 (drafted \
         tokens per round or plain token), gamma of rounds alone (where few texts are speculated on, only of those), and the \
         share of the output that was decoded plainly. Load is clients ÷ the engine's maximum of running sequences. Requests that \
         began in the second half of the time.{}",
        key.collect::<String>()
    );
    let content = drawn(cells) + &table(&sweep::rows(cells));
    section(page, "Gamma over temperature and load", &says, &content);
}

/// From green, where the engine has room, to red.
fn ink(number: usize, of: usize) -> String {
    let hue = 175.0 - 165.0 * number as f64 / of.saturating_sub(1).max(1) as f64;
    format!("hsl({hue:.0} 65% 42%)")
}

fn drawn(cells: &[Cell]) -> String {
    let mut svg = format!("<svg viewBox=\"0 0 900 {:.0}\" role=\"img\">", RANGE.1 + 40.0);
    let most = cells.iter().filter_map(|cell| cell.gamma).fold(1.0, f64::max);
    let [first, second, third] = PANELS;
    panel(&mut svg, first, "gamma, plain is 0", most, 1.0, cells, |cell| Some(cell.drafted));
    panel(&mut svg, second, "gamma of rounds", most, 1.0, cells, |cell| cell.gamma);
    panel(&mut svg, third, "plain, % of the output", 100.0, 100.0, cells, |cell| Some(cell.plain));
    svg + "</svg>"
}

/// One panel: values times `scale`, from 0 to at least `most`.
fn panel(
    svg: &mut String,
    (start, end): (f64, f64),
    title: &str,
    most: f64,
    scale: f64,
    cells: &[Cell],
    value: impl Fn(&Cell) -> Option<f64>,
) {
    let (above, below) = RANGE;
    let step = tick(most);
    let top = (most / step).ceil() * step;
    let temperatures = sweep::values(cells, |cell| cell.temperature);
    let hottest = temperatures.iter().copied().fold(0.1, f64::max);
    let x = |temperature: f64| start + 12.0 + (end - start - 24.0) * temperature / hottest;
    let y = |value: f64| below - (below - above) * value * scale / top;
    let _ = write!(svg, "<text x=\"{start:.0}\" y=\"14\">{title}</text>");
    for number in 0..=(top / step).round() as u32 {
        let label = f64::from(number) * step;
        let at = y(label / scale);
        rule(svg, (start, end), at, label);
    }
    for temperature in temperatures {
        let _ = write!(
            svg,
            "<text class=\"soft\" x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">T={temperature}</text>",
            x(temperature),
            below + 18.0
        );
    }
    let clients = sweep::values(cells, |cell| cell.clients);
    for (number, &count) in clients.iter().enumerate() {
        let ink = ink(number, clients.len());
        let of = cells.iter().filter(|cell| cell.clients == count);
        let points: Vec<(f64, f64)> =
            of.filter_map(|cell| Some((x(cell.temperature), y(value(cell)?)))).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(svg, "<polyline style=\"stroke:{ink}\" points=\"{}\"/>", path.join(" "));
        for (x, y) in points {
            let _ = write!(svg, "<circle style=\"fill:{ink}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(clients: usize, temperature: f64, gamma: Option<f64>) -> Cell {
        Cell { clients, load: clients as f64 / 16.0, temperature, gamma, plain: 0.25, ..Cell::default() }
    }

    #[test]
    fn there_is_a_line_for_each_number_of_clients_in_each_panel() {
        let cells = [
            cell(1, 0.0, Some(12.0)),
            cell(1, 1.0, Some(3.0)),
            cell(16, 0.0, Some(4.0)),
            cell(16, 1.0, None),
        ];
        let mut page = String::new();
        put(&mut page, &cells);
        assert_eq!((page.matches("<svg").count(), page.matches("<polyline").count()), (1, 6));
        assert_eq!(page.matches("<circle").count(), 4 + 3 + 4, "a cell without a round has no draft length");
        assert!(page.contains("1 client (load 0.06)") && page.contains("16 clients (load 1.00)"));
        assert!(page.contains("0.00, 12.0, 25 %") && !page.contains("NaN"), "{page}");
        put(&mut page, &[]);
        assert_eq!(page.matches("<svg").count(), 1);
    }
}
