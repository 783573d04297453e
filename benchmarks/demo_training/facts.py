"""Hand-written facts of the demo model's little world, as plain data.

Knows nothing about dialogues, tokens or training; `corpus` and `skills` turn these tables into text.
"""
# ruff: noqa: SIM905 - a table of words is easier to read and to extend as one text

from __future__ import annotations

#: country, capital, continent; the bare name is used in questions ("the" is added where English wants it)
_ATLAS = """
France Paris Europe|Germany Berlin Europe|Italy Rome Europe|Spain Madrid Europe|Portugal Lisbon Europe
Norway Oslo Europe|Sweden Stockholm Europe|Denmark Copenhagen Europe|Finland Helsinki Europe
Iceland Reykjavik Europe|Ireland Dublin Europe|England London Europe|Scotland Edinburgh Europe
Wales Cardiff Europe|Belgium Brussels Europe|the_Netherlands Amsterdam Europe|Austria Vienna Europe
Switzerland Bern Europe|Poland Warsaw Europe|Hungary Budapest Europe|the_Czech_Republic Prague Europe
Slovakia Bratislava Europe|Slovenia Ljubljana Europe|Croatia Zagreb Europe|Serbia Belgrade Europe
Greece Athens Europe|Bulgaria Sofia Europe|Romania Bucharest Europe|Ukraine Kyiv Europe
Russia Moscow Europe_and_Asia|Estonia Tallinn Europe|Latvia Riga Europe|Lithuania Vilnius Europe
Albania Tirana Europe|Malta Valletta Europe|Cyprus Nicosia Europe|the_United_Kingdom London Europe
Turkey Ankara Europe_and_Asia|Egypt Cairo Africa|Morocco Rabat Africa|Algeria Algiers Africa
Tunisia Tunis Africa|Kenya Nairobi Africa|Ethiopia Addis_Ababa Africa|Nigeria Abuja Africa|Ghana Accra Africa
Senegal Dakar Africa|Uganda Kampala Africa|Japan Tokyo Asia|China Beijing Asia|India New_Delhi Asia
Pakistan Islamabad Asia|Nepal Kathmandu Asia|Thailand Bangkok Asia|Vietnam Hanoi Asia|Indonesia Jakarta Asia
the_Philippines Manila Asia|South_Korea Seoul Asia|Mongolia Ulaanbaatar Asia|Iran Tehran Asia
Iraq Baghdad Asia|Saudi_Arabia Riyadh Asia|Lebanon Beirut Asia|the_United_States Washington North_America
Canada Ottawa North_America|Mexico Mexico_City North_America|Cuba Havana North_America
Jamaica Kingston North_America|Brazil Brasilia South_America|Argentina Buenos_Aires South_America
Chile Santiago South_America|Peru Lima South_America|Colombia Bogota South_America|Ecuador Quito South_America
Uruguay Montevideo South_America|Bolivia Sucre South_America|Venezuela Caracas South_America
Australia Canberra Australia|New_Zealand Wellington Oceania
"""
ATLAS: list[tuple[str, str, str]] = [
    (country.replace("_", " "), capital.replace("_", " "), continent.replace("_", " "))
    for country, capital, continent in (row.split() for row in _ATLAS.replace("\n", "|").split("|") if row.strip())
]
#: other names under which people ask for a country
NICKNAMES: dict[str, list[str]] = {
    "the United States": ["the USA", "the US", "America", "USA"],
    "the United Kingdom": ["the UK", "UK", "Britain", "Great Britain"],
    "the Netherlands": ["Netherlands", "Holland"],
    "the Czech Republic": ["Czech Republic", "Czechia"],
    "the Philippines": ["Philippines"],
    "South Korea": ["Korea"],
}
#: places whose capital the model does not claim to know
ELSEWHERE = (
    "Atlantis|Narnia|Mordor|Texas|California|Bavaria|Florida|Sicily|Alaska|Utopia|Gondor|the moon|Mars|Wakanda|Oz|"
    "Zambia|Malawi|Bhutan|Fiji|Tonga|Samoa|Togo|Benin|Chad|Niger|Mali|Gabon|Angola|Oman|Qatar|Yemen|Kuwait|Laos|"
    "Cambodia|Burma|Brunei|Panama|Honduras|Paraguay|Guyana|Haiti|Belize|Barbados|Georgia|Armenia|Moldova|Monaco|"
    "Andorra|Kosovo|Syria|Jordan|Libya|Sudan|Rwanda|Botswana|Namibia|Somalia|Lesotho|Bangladesh|Singapore|Tibet"
).split("|")
OPPOSITES: list[tuple[str, str]] = [
    (pair.split("/")[0], pair.split("/")[1])
    for pair in (
        "hot/cold big/small tall/short up/down left/right day/night black/white good/bad happy/sad fast/slow old/young "
        "open/closed full/empty hard/soft rich/poor light/dark wet/dry clean/dirty early/late high/low near/far "
        "strong/weak thick/thin loud/quiet true/false in/out on/off yes/no first/last always/never love/hate begin/end "
        "start/stop win/lose buy/sell give/take push/pull come/go laugh/cry awake/asleep alive/dead north/south "
        "east/west summer/winter top/bottom inside/outside before/after easy/difficult sweet/sour "
        "wide/narrow deep/shallow sharp/blunt brave/afraid more/less many/few remember/forget question/answer "
        "friend/enemy war/peace man/woman boy/girl king/queen online/offline rise/fall arrive/leave smooth/rough "
        "cheap/expensive safe/dangerous same/different male/female birth/death success/failure hello/goodbye"
    ).split()
]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
NAMES = (
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Kim Lena Max Nina Oscar Paul Rosa Sam Tom Uma Vera Will Yara "
    "Zoe Alice Bob Carol Dan Eve Frank Grace Henry Irene Jack Kate Liam Mia Noah Olivia Peter Quinn Ruth "
    "Sara Tim Ursula "
    "Victor Wendy Xavier Yusuf Zara Ahmed Aisha Chen Diego Elena Fatima Giulia Hana Ivan Jin Kofi Lucia "
    "Mateo Nadia Omar "
    "Priya Ravi Sofia Tariq Wei Yuki Ada Alan Lukas Marie Pierre Hans Olga Igor Maria Jose Pedro Ana "
    "Mehmet Ali John Mary "
    "James Robert Linda Susan Karen Nancy Mark Steven Andrew Kevin Brian George Edward Laura Julia "
    "Martin Simon Chris Alex "
    "Jamie Robin Charlie Taylor Jordan Casey Finn Theo Leo Luna Ella Ava Isla Freya Astrid Bjorn Sven "
    "Ingrid Marta Piotr"
).split()
WORDS = (
    "tidemill cat dog house tree water river sea tide mill wheel stone sand wave boat ship sail wind rain snow "
    "sun moon star sky "
    "light lamp book page word letter name number bread milk apple lemon sugar salt tea coffee cup plate "
    "table chair door "
    "window wall roof floor room bed key lock road bridge town city street school train car bike horse "
    "cow sheep bird fish "
    "frog mouse bear lion tiger fox wolf leaf flower grass hill lake fire ice cloud storm day night week "
    "month year hour "
    "time clock bell music song story poem green blue red white black yellow brown orange happy quiet "
    "quick small large "
    "round warm cold soft hello world thanks please friend mother father sister brother baby child king queen garden "
    "paper pencil glass bottle basket button pocket summer winter spring autumn token block chunk batch cache engine "
    "server model layer queue prompt stream decode prefill python banana potato tomato cheese butter "
    "pepper rabbit monkey "
    "spider turtle doctor teacher farmer miller sailor island forest mountain village kitchen hammer "
    "ladder candle mirror"
).split()
SENTENCE_PARTS: dict[str, list[str]] = {
    "who": "the cat|my dog|a small bird|the old miller|the tide|the moon|our teacher|the server|a red boat|every child|"
    "the quick fox|the green lamp|nobody|she|he|the queen|my brother|the river|a grey wolf|the sailor".split("|"),
    "does": "likes|sees|finds|wants|follows|carries|hears|knows|paints|brings|loves|needs|watches|turns|counts".split(
        "|"
    ),
    "what": "the sea|a stone|fresh bread|the wheel|a yellow flower|two apples|the last train|cold water|"
    "a song|the door|"
    "many books|the morning|a blue cup|the bridge|old letters|warm milk|a token|the long road|white snow|tea".split(
        "|"
    ),
    "how": "|at night|in the garden|very much|again|every day|by the sea|without a word|in summer|today|slowly".split(
        "|"
    ),
}
