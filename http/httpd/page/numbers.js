// Figures as people read them; a dash for what is not known.

const NONE = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function count(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : NONE;
}

function short(value) {
  if (!known(value)) return NONE;
  for (const [unit, name] of [[1e9, "billion"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= (unit === 1e3 ? 1e4 : unit)) return `${rounded(value / unit)} ${name}`;
  }
  return value >= 100 ? count(value) : rounded(value);
}

// With one decimal where it says something.
function rounded(value) {
  return String(Number(value.toFixed(value < 100 ? 1 : 0)));
}

function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${value.toFixed(value < 10 && index ? 1 : 0)} ${units[index]}`;
}

function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds > 0 && seconds < 0.00095) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.0995) return `${(seconds * 1e3).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1e3).toFixed(0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h`;
}

function share(part, whole) {
  return known(part) && whole ? `${Math.round((part / whole) * 100)} %` : NONE;
}

// A round number not below `value`, for the top of a chart.
function roundUp(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * unit >= value * 0.9999);
}
