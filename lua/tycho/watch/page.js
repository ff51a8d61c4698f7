// The page of `tycho watch`: lists runs, asks for the new lines of those that are chosen, and draws them. What files
// say reaches the page as text alone.
"use strict"

const palettes = {
  light: ["#2f6fde", "#e0631b", "#16935a", "#b83290", "#8250c4", "#b98500", "#0c8fa8", "#d0393e", "#5d6b82", "#7a9a01"],
  dark: ["#6ea1ff", "#ff9a56", "#4ccf8f", "#f07cc8", "#b694f0", "#e8c04a", "#4fcbe2", "#ff7f7f", "#a3b0c6", "#b5d44a"],
}
const $ = id => document.getElementById(id)
const known = new Map() // name: { info, chosen, color, next, mark, metrics, lines, about, version }
const state = { axis: "step", smooth: 0.8, log: false, trim: true, metrics: "", filter: "", range: null, at: {} }
let listed = false, dirty = true

function element(tag, properties, ...children) {
  const e = Object.assign(document.createElement(tag), properties)
  e.append(...children)
  return e
}

// ---- texts ----

function number(v) {
  if (v === undefined || v === null) return ""
  if (!Number.isFinite(v)) return String(v)
  const a = Math.abs(v)
  if (Number.isInteger(v) && a < 1e7) return v.toLocaleString("en")
  if (a >= 1e5 || a < 1e-3) return v.toExponential(3).replace(/\.?0+e/, "e")
  return String(Number(v.toPrecision(5)))
}

function duration(s) {
  s = Math.round(s)
  if (s < 60) return s + " s"
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60 && s < 600 ? (s % 60) + " s" : "")
  if (s < 172800) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min"
  return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h"
}

// ---- settings, kept in the address ----

function remember() {
  const p = new URLSearchParams()
  for (const [name, run] of known) if (run.chosen) p.append("run", name)
  for (const k of ["axis", "smooth", "metrics", "filter"]) if (state[k] !== "") p.set(k, state[k])
  for (const k of ["log", "trim"]) p.set(k, Number(state[k]))
  history.replaceState(null, "", "#" + p)
}

const wanted = new URLSearchParams(location.hash.slice(1))
for (const k of ["axis", "metrics", "filter"]) if (wanted.get(k)) state[k] = wanted.get(k)
if (state.axis !== "time") state.axis = "step"
if (wanted.get("smooth")) state.smooth = Math.min(0.99, Math.max(0, Number(wanted.get("smooth")) || 0))
for (const k of ["log", "trim"]) if (wanted.has(k)) state[k] = wanted.get(k) === "1"

function theme(name) {
  document.documentElement.dataset.theme = name
  dirty = true
}
const prefers = matchMedia("(prefers-color-scheme: dark)")
theme(wanted.get("theme") || (prefers.matches ? "dark" : "light"))
prefers.addEventListener("change", () => theme(prefers.matches ? "dark" : "light"))
const colors = () => palettes[document.documentElement.dataset.theme] || palettes.light

// ---- the list of runs ----

function choose(run, chosen) {
  run.chosen = chosen
  if (chosen) {
    const taken = new Set([...known.values()].filter(r => r.chosen && r !== run).map(r => r.color))
    run.color = 0
    while (taken.has(run.color) && run.color < 60) run.color++
  }
}
const colorOf = run => colors()[run.color % colors().length]
const chosenRuns = () => [...known.values()].filter(r => r.chosen)

function takeList(list) {
  for (const info of list.runs) {
    const run = known.get(info.name)
    if (run) run.info = info
    else known.set(info.name, { info, name: info.name, chosen: false, color: 0, ...nothing() })
  }
  const names = new Set(list.runs.map(r => r.name))
  for (const name of known.keys()) if (!names.has(name)) known.delete(name)
  if (!listed && list.runs.length) {
    listed = true
    const asked = wanted.getAll("run").filter(n => known.has(n))
    const running = info => info.state === "running"
    const first = [...list.runs].sort((a, b) => running(b) - running(a) || b.changed - a.changed)
    for (const name of asked.length ? asked : first.slice(0, 3).map(r => r.name)) choose(known.get(name), true)
  }
  $("folder").textContent = list.folder
  const none = list.runs.length === 0, chosen = chosenRuns()
  $("empty").hidden = !none && chosen.length > 0
  $("empty").textContent = none ? "There are no runs below this folder yet: no file named metrics.jsonl. This page " +
    "goes on looking; train.fit writes one with its option log." : "Choose runs on the left."
  $("tools").hidden = none || !chosen.length
  const active = chosen.filter(r => r.info.state === "running")
  document.title = active.length ? `${active.length} running · Runs` : "Runs"
  showList(list.now)
}

function showList(now) {
  const words = state.filter.toLowerCase()
  const rows = [...known.values()].filter(r => r.name.toLowerCase().includes(words))
    .sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }))
  $("runs").replaceChildren(...rows.map(run => {
    const i = run.info
    const box = element("input", { type: "checkbox", checked: run.chosen, onchange: () => {
      choose(run, box.checked)
      remember()
      poll()
    } })
    const dot = element("span", { className: "dot" })
    if (run.chosen) dot.style.background = dot.style.borderColor = colorOf(run)
    const all = i.steps ? " / " + number(i.steps) : " steps", running = i.state === "running"
    const steps = (i.step === undefined ? "no steps yet" : number(i.step) + all) +
      (run.broken ? `, ${number(run.broken)} broken lines` : "")
    const left = i.left === undefined ? "" : duration(i.left) + " left"
    const late = running ? left : duration(now - i.changed) + " ago"
    const rate = running && i.rate ? number(Number(i.rate.toPrecision(3))) + "/s" : ""
    const label = element("label", {}, box, dot, element("span", { className: "name", textContent: run.name }))
    if (i.steps) {
      const bar = element("i")
      bar.style.width = Math.min(100, 100 * (i.step || 0) / i.steps) + "%"
      label.append(element("span", { className: "bar" }, bar))
    }
    label.append(element("span", { className: "facts" }, element("span", { textContent: steps }),
      element("span", { textContent: rate })))
    label.append(element("span", { className: "facts" },
      element("span", { className: "state " + i.state, textContent: i.state }), element("span", { textContent: late })))
    return element("li", {}, label)
  }))
}

// ---- reading metrics ----

function nothing() { return { next: 0, mark: "", metrics: new Map(), lines: 0, broken: 0, began: undefined } }

function takeLine(run, text) {
  let entry
  try { entry = JSON.parse(text) } catch { run.broken++; return }
  if (!entry || typeof entry !== "object" || Array.isArray(entry)) { run.broken++; return }
  const step = typeof entry.step === "number" ? entry.step : run.lines
  const time = typeof entry.time === "number" ? entry.time : undefined
  run.lines++
  if (run.began === undefined) run.began = time
  for (const [name, value] of Object.entries(entry)) {
    if (name === "step" || name === "time") continue
    const y = typeof value === "number" ? value : /^-?(inf|nan|-nan)$/.test(value) ? NaN : undefined
    if (y === undefined) continue
    let m = run.metrics.get(name)
    if (!m) {
      if (run.metrics.size >= 500) continue
      run.metrics.set(name, m = { step: [], time: [], y: [], bad: 0, smooth: null })
    }
    if (!Number.isFinite(y)) { m.bad++; continue }
    m.step.push(step)
    m.time.push(time === undefined || run.began === undefined ? m.time.length : time - run.began)
    m.y.push(y)
    if (m.least === undefined || y < m.least) { m.least = y; m.leastAt = step }
    if (m.most === undefined || y > m.most) { m.most = y; m.mostAt = step }
    m.last = y
  }
}

async function readLines(run) {
  for (;;) {
    if (run.info.size === run.next && run.size === run.info.size && run.changed === run.info.changed) return
    run.size = run.info.size
    run.changed = run.info.changed
    const query = new URLSearchParams({ run: run.name, from: run.next, mark: run.mark })
    const reply = await fetch("api/lines?" + query)
    if (!reply.ok) return // it is gone; the next list will say so
    const bytes = new Uint8Array(await reply.arrayBuffer())
    const end = bytes.indexOf(10), decoder = new TextDecoder()
    const head = JSON.parse(decoder.decode(bytes.subarray(0, end)))
    if (head.reset) Object.assign(run, nothing())
    for (const line of decoder.decode(bytes.subarray(end + 1)).split("\n")) if (line) takeLine(run, line)
    dirty = dirty || head.next !== run.next
    run.next = head.next
    run.mark = head.mark
    if (!head.more) return
    run.size = -1
    draw()
  }
}

async function readAbout(run) {
  if (run.version === run.info.version) return
  run.version = run.info.version
  const reply = await fetch("api/about?" + new URLSearchParams({ run: run.name }))
  if (!reply.ok) return
  const about = await reply.json()
  const parse = text => { try { return JSON.parse(text) || {} } catch { return {} } }
  const results = parse(about.results), recipe = parse(about.recipe)
  const own = parse(about.run), all = { ...results.args, ...recipe, ...recipe.args, ...own.options, ...own }
  for (const name of ["args", "options", "began"]) delete all[name]
  run.about = { pictures: about.pictures, arguments: all }
  showSheets()
  showArguments()
}

let polling = false, again = false
async function poll() {
  if (polling) { again = true; return }
  polling = true
  try {
    do {
      again = false
      takeList(await (await fetch("api/runs")).json())
      $("alive").className = "beat"
      for (const run of chosenRuns()) {
        await readLines(run)
        await readAbout(run)
      }
    } while (again)
    setTimeout(() => { $("alive").className = "" }, 300)
  } catch (problem) {
    console.error(problem)
    $("alive").className = "lost"
  }
  polling = false
  showCharts()
  document.body.dataset.ready = chosenRuns().map(r => r.lines).join(" ") // for tests
}

// ---- curves ----

// A moving average that begins at the first value, not at 0; only what is new is computed. A few values stay as
// they are.
function smoothed(m) {
  const w = state.smooth
  if (!w || m.y.length < 50) return m.y
  if (!m.smooth || m.smooth.w !== w) m.smooth = { w, y: [], sum: 0, weight: 0 }
  const s = m.smooth
  for (let i = s.y.length; i < m.y.length; i++) {
    s.sum = w * s.sum + (1 - w) * m.y[i]
    s.weight = w * s.weight + 1 - w
    s.y.push(s.sum / s.weight)
  }
  return s.y
}

function rank(name) {
  if (name === "loss") return 0
  return /loss|error|perplexity/.test(name) ? 1 : /^(rate|norm|lr)$/.test(name) ? 3 : 2
}

function metricNames() {
  const names = new Set()
  for (const run of chosenRuns()) for (const name of run.metrics.keys()) names.add(name)
  return [...names].filter(n => n.toLowerCase().includes(state.metrics.toLowerCase()))
    .sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
}

const charts = new Map()
function showCharts() {
  const names = metricNames()
  for (const name of charts.keys()) if (!names.includes(name)) charts.delete(name)
  for (const name of names) if (!charts.has(name)) charts.set(name, newChart(name))
  const cards = names.map(n => charts.get(n).card), old = [...$("charts").children]
  if (cards.length !== old.length || cards.some((c, i) => c !== old[i])) $("charts").replaceChildren(...cards)
  if (dirty) showValues()
  dirty = false
  draw()
}

function newChart(name) {
  const canvas = element("canvas"), note = element("small")
  const chart = { name, canvas, note, card: element("div", { className: "card" },
    element("h3", {}, name, note), canvas) }
  const xAt = event => {
    const p = chart.plot, at = event.clientX - canvas.getBoundingClientRect().left
    return p && p.x0 + (at - p.left) / p.width * (p.x1 - p.x0)
  }
  canvas.onpointerdown = e => { chart.from = chart.to = xAt(e); canvas.setPointerCapture(e.pointerId) }
  canvas.onpointermove = e => {
    if (chart.from !== undefined) chart.to = xAt(e)
    chart.hover = xAt(e)
    drawChart(chart)
    showTip(chart, e)
  }
  canvas.onpointerup = () => {
    const { from, to, plot } = chart
    chart.from = undefined
    if (plot && Math.abs(to - from) > 0.01 * (plot.x1 - plot.x0)) zoom([Math.min(from, to), Math.max(from, to)])
    else drawChart(chart)
  }
  canvas.onpointerleave = () => { chart.hover = undefined; $("tip").hidden = true; drawChart(chart) }
  canvas.ondblclick = () => zoom(null)
  return chart
}

function zoom(range) {
  state.range = range
  $("whole").hidden = !range
  draw()
}

let asked = false
function draw() { // once a frame, and only what is seen
  if (asked) return
  asked = true
  requestAnimationFrame(() => {
    asked = false
    for (const chart of charts.values()) {
      const box = chart.canvas.getBoundingClientRect()
      if (box.bottom > -200 && box.top < innerHeight + 200) drawChart(chart)
    }
  })
}

// The first position at or after x in ascending numbers.
function search(list, x) {
  let lo = 0, hi = list.length
  while (lo < hi) { const mid = (lo + hi) >> 1; if (list[mid] < x) lo = mid + 1; else hi = mid }
  return lo
}

const seconds = [1, 5, 15, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400]
function ticks(from, to, most, steps) {
  const rough = (to - from) / most, unit = 10 ** Math.floor(Math.log10(rough)), list = []
  const step = (steps || []).find(s => s >= rough) || [1, 2, 5, 10].find(f => f * unit >= rough) * unit
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9 && list.length < 50; i++) list.push(i * step)
  return list
}

function logTicks(from, to) { // in powers of 10
  const list = []
  for (let e = Math.floor(from); e <= to + 1; e++) for (const f of [1, 2, 5]) {
    const v = e + Math.log10(f)
    if (v >= from && v <= to && (f === 1 || to - from < 2)) list.push(v)
  }
  return list.length > 1 ? list.filter((_, i) => i % Math.ceil(list.length / 8) === 0)
    : ticks(10 ** from, 10 ** to, 4).map(Math.log10)
}

function drawChart(chart) {
  const { canvas } = chart, ratio = devicePixelRatio || 1
  const w = canvas.clientWidth, h = canvas.clientHeight
  if (!w || !h) return
  if (canvas.width !== Math.round(w * ratio)) canvas.width = Math.round(w * ratio)
  if (canvas.height !== Math.round(h * ratio)) canvas.height = Math.round(h * ratio)
  const g = canvas.getContext("2d"), css = getComputedStyle(document.documentElement)
  g.setTransform(ratio, 0, 0, ratio, 0, 0)
  g.clearRect(0, 0, w, h)
  const up = state.log ? v => (v > 0 ? Math.log10(v) : NaN) : v => v
  const series = []
  let x0 = Infinity, x1 = -Infinity, bad = 0
  for (const run of chosenRuns()) {
    const m = run.metrics.get(chart.name)
    if (!m) continue
    bad += m.bad
    if (!m.y.length) continue
    const x = m[state.axis]
    series.push({ run, x, raw: m.y, y: smoothed(m) })
    x0 = Math.min(x0, x[0])
    x1 = Math.max(x1, x[x.length - 1])
  }
  chart.note.textContent = bad ? `${bad} not finite` : ""
  chart.series = series
  if (state.range) [x0, x1] = state.range
  if (!(x1 > x0)) { x1 = x0 + 1; x0 -= 1 }
  // What is seen of each curve: for each pixel the lowest and the highest point, and the range of y.
  const left = 54, right = 10, top = 8, bottom = 22, width = w - left - right, height = h - top - bottom
  const px = x => left + (x - x0) / (x1 - x0) * width
  const ys = []
  for (const s of series) {
    const from = Math.max(0, search(s.x, x0) - 1), to = Math.min(s.x.length, search(s.x, x1) + 1)
    const path = (y, into) => {
      const points = []
      let column = null, lo = 0, hi = 0
      const put = i => { const v = up(y[i]); points.push(px(s.x[i]), v); if (into && Number.isFinite(v)) ys.push(v) }
      const end = () => { if (column !== null) { put(Math.min(lo, hi)); if (lo !== hi) put(Math.max(lo, hi)) } }
      const dense = to - from > 3 * width
      for (let i = from; i < to; i++) {
        if (!dense) { put(i); continue }
        const c = Math.floor(px(s.x[i]))
        if (c !== column) { end(); column = c; lo = hi = i }
        else if (y[i] < y[lo]) lo = i
        else if (y[i] > y[hi]) hi = i
      }
      if (dense) end()
      return points
    }
    s.faint = s.y === s.raw ? null : path(s.raw, true)
    s.points = path(s.y, true)
  }
  ys.sort((a, b) => a - b)
  const cut = state.trim && ys.length > 20 ? Math.floor(ys.length * 0.02) : 0
  let y0 = ys[cut], y1 = ys[ys.length - 1 - cut]
  if (y0 === undefined) { y0 = 0; y1 = 1 }
  const room = (y1 - y0) * 0.06 || Math.abs(y0) * 0.1 || 1
  y0 -= room
  y1 += room
  const py = y => top + (y1 - y) / (y1 - y0) * height
  chart.plot = { left, width, x0, x1 }

  g.font = "11px system-ui, 'DejaVu Sans', sans-serif"
  g.lineWidth = 1
  g.strokeStyle = css.getPropertyValue("--grid")
  g.fillStyle = css.getPropertyValue("--soft")
  g.textAlign = "right"
  g.textBaseline = "middle"
  for (const t of state.log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    g.beginPath(); g.moveTo(left, py(t)); g.lineTo(w - right, py(t)); g.stroke()
    g.fillText(number(Number((state.log ? 10 ** t : t).toPrecision(4))), left - 6, py(t))
  }
  g.textAlign = "center"
  g.textBaseline = "top"
  for (const t of ticks(x0, x1, Math.max(2, width / 80), state.axis === "time" && seconds)) {
    g.beginPath(); g.moveTo(px(t), top); g.lineTo(px(t), h - bottom); g.stroke()
    const text = state.axis === "time" ? duration(t).trim() : x1 >= 1e4 && t ? number(t / 1000) + "k" : number(t)
    const half = g.measureText(text).width / 2
    g.fillText(text, Math.min(px(t), w - half - 1), h - bottom + 6)
  }
  g.save()
  g.beginPath(); g.rect(left, top - 4, width + 5, height + 8); g.clip()
  g.lineJoin = "round"
  const line = (points, color, alpha, thick) => {
    g.globalAlpha = alpha; g.strokeStyle = g.fillStyle = color; g.lineWidth = thick
    g.beginPath()
    let drawing = false
    for (let i = 0; i < points.length; i += 2) {
      if (!Number.isFinite(points[i + 1])) { drawing = false; continue }
      if (drawing) g.lineTo(points[i], py(points[i + 1])); else g.moveTo(points[i], py(points[i + 1]))
      drawing = true
    }
    g.stroke()
    if (points.length <= 80) for (let i = 0; i < points.length && thick > 1; i += 2) {
      if (Number.isFinite(points[i + 1])) { g.beginPath(); g.arc(points[i], py(points[i + 1]), 2.2, 0, 7); g.fill() }
    }
  }
  for (const s of series) if (s.faint) line(s.faint, colorOf(s.run), 0.22, 1)
  for (const s of series) line(s.points, colorOf(s.run), 1, 1.7)
  g.globalAlpha = 1
  if (chart.from !== undefined) {
    g.globalAlpha = 0.15; g.fillStyle = css.getPropertyValue("--accent")
    g.fillRect(px(chart.from), top, px(chart.to) - px(chart.from), height)
    g.globalAlpha = 1
  }
  if (chart.hover !== undefined) {
    g.strokeStyle = css.getPropertyValue("--soft"); g.lineWidth = 1
    g.beginPath(); g.moveTo(px(chart.hover), top); g.lineTo(px(chart.hover), h - bottom); g.stroke()
    for (const s of series) {
      const i = nearest(s.x, chart.hover)
      g.fillStyle = colorOf(s.run)
      g.beginPath(); g.arc(px(s.x[i]), py(up(s.y[i])), 3.2, 0, 7); g.fill()
    }
  }
  g.restore()
}

function nearest(list, x) {
  const i = Math.min(list.length - 1, search(list, x))
  return i > 0 && x - list[i - 1] < list[i] - x ? i - 1 : i
}

function showTip(chart, event) {
  const tip = $("tip")
  if (!chart.series || !chart.series.length || chart.hover === undefined) { tip.hidden = true; return }
  const rows = chart.series.map(s => {
    const i = nearest(s.x, chart.hover), dot = element("span", { className: "dot" })
    dot.style.background = dot.style.borderColor = colorOf(s.run)
    const text = number(s.raw[i]) + (s.y === s.raw ? "" : ` (${number(s.y[i])})`)
    return { value: s.raw[i], row: element("div", {}, dot, s.run.name, element("b", { textContent: text })), x: s.x[i] }
  }).sort((a, b) => b.value - a.value)
  const x = rows[0].x
  tip.replaceChildren(element("div", { textContent: state.axis === "time" ? duration(x) : "step " + number(x) }),
    ...rows.slice(0, 12).map(r => r.row))
  tip.hidden = false
  const box = tip.getBoundingClientRect()
  tip.style.left = Math.min(innerWidth - box.width - 8, event.clientX + 16) + "px"
  tip.style.top = Math.min(innerHeight - box.height - 8, event.clientY + 14) + "px"
}

// ---- tables and pictures ----

function table(rows) {
  return element("table", {}, ...rows.map((cells, i) => element("tr", { className: cells.differs ? "differs" : "" },
    ...cells.map(c => element(i ? "td" : "th", {}, c)))))
}

function named(run) {
  const dot = element("span", { className: "dot" })
  dot.style.background = dot.style.borderColor = colorOf(run)
  return element("span", {}, dot, " ", run.name)
}

function showValues() {
  const rows = [["metric", "run", "last", "lowest", "highest"]]
  const at = (v, step) => element("span", {}, number(v), element("small", { textContent: "  at " + number(step) }))
  for (const name of metricNames()) for (const run of chosenRuns()) {
    const m = run.metrics.get(name)
    if (m && m.y.length) rows.push([name, named(run), number(m.last), at(m.least, m.leastAt), at(m.most, m.mostAt)])
  }
  $("values").hidden = rows.length < 2
  $("values").lastElementChild.replaceChildren(table(rows.slice(0, 400)))
}

const shown = v => (v !== null && typeof v === "object" ? JSON.stringify(v) : String(v))
function showArguments() {
  const runs = chosenRuns().filter(r => r.about && Object.keys(r.about.arguments).length), names = new Set()
  for (const r of runs) for (const k of Object.keys(r.about.arguments)) names.add(k)
  const rows = [["", ...runs.map(named)]]
  for (const name of [...names].sort()) {
    const cells = runs.map(r => (name in r.about.arguments ? shown(r.about.arguments[name]) : "–"))
    const row = [name, ...cells]
    row.differs = cells.some(c => c !== cells[0])
    if (row.differs || !$("differing").checked) rows.push(row)
  }
  $("arguments").hidden = !runs.length
  $("arguments").lastElementChild.replaceChildren(table(rows))
}

// Pictures whose names differ in numbers alone are one series, which the slider goes through.
const sliders = new Map()
function showSheets() {
  const cards = []
  for (const run of chosenRuns()) {
    const groups = new Map()
    for (const picture of run.about ? run.about.pictures : []) {
      const key = picture.path.replace(/\d+(?=[^/]*$)/g, "#")
      if (!groups.has(key)) groups.set(key, [])
      groups.get(key).push(picture)
    }
    for (const [key, list] of groups) {
      list.sort((a, b) => a.path.localeCompare(b.path, "en", { numeric: true }))
      cards.push(sheet(run, run.name + "\n" + key, list))
    }
  }
  $("sheets").hidden = !cards.length
  $("sheets").lastElementChild.replaceChildren(...cards.slice(0, 60))
}

function sheet(run, key, list) {
  const image = element("img", { loading: "lazy", alt: "" }), label = element("span"), when = element("span")
  const dot = element("span", { className: "dot" })
  dot.style.background = dot.style.borderColor = colorOf(run)
  const slider = element("input", { type: "range", min: 0, max: list.length - 1, hidden: list.length < 2 })
  slider.ariaLabel = "which picture"
  const show = () => {
    const i = Number(slider.value), p = list[i]
    sliders.set(key, i === list.length - 1 ? undefined : p.path) // at the end: the newest, also of those to come
    image.src = "file?" + new URLSearchParams({ path: p.path, at: p.changed })
    label.textContent = p.path.startsWith(run.name + "/") ? p.path.slice(run.name.length + 1) : p.path
    when.textContent = list.length > 1 ? `${i + 1} of ${list.length}` : new Date(p.changed * 1000).toLocaleString()
  }
  const kept = list.findIndex(p => p.path === sliders.get(key))
  slider.value = kept < 0 ? list.length - 1 : kept
  slider.oninput = show
  image.onload = () => { image.className = image.naturalWidth < 400 ? "small" : "" }
  show()
  return element("div", { className: "card sheet" }, element("h3", {}, dot, run.name), image, slider,
    element("div", { className: "facts" }, label, when))
}

// ---- the tools ----

function bind(id, event, key, read) {
  const e = $(id)
  if (e.type === "checkbox") e.checked = state[key]; else e.value = state[key]
  e.addEventListener(event, () => {
    state[key] = read ? read(e) : e.type === "checkbox" ? e.checked : e.value
    if (key === "axis") zoom(null)
    $("smoothed").textContent = state.smooth
    dirty = true
    remember()
    showCharts()
  })
}
bind("axis", "change", "axis")
bind("smooth", "input", "smooth", e => Number(e.value))
bind("log", "change", "log")
bind("trim", "change", "trim")
bind("metrics", "input", "metrics")
bind("filter", "input", "filter", e => { state.filter = e.value; showList(Date.now() / 1000); return e.value })
$("smoothed").textContent = state.smooth
$("differing").onchange = showArguments
$("whole").onclick = () => zoom(null)
$("theme").onclick = () => {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark")
  showList(Date.now() / 1000); showCharts(); showSheets(); showArguments()
}
addEventListener("resize", draw)
addEventListener("scroll", draw, { passive: true })

async function live() {
  if (!document.hidden || !listed) await poll()
  setTimeout(live, 2000)
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll() })
live()
